"""A process that runs programs in turn: what they import is imported once. `python programs.py` is that process.

It reads a path per line, and prints the program's output as a line of JSON.
"""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple


class Said(NamedTuple):
    """What a program printed; with a traceback, where it failed."""

    stdout: str
    stderr: str


class Interpreter:
    """A Python process that waits for programs."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, program: Path) -> Said:
        """Run a file as a program of its own."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(f"{program}\n")
        self._process.stdin.flush()
        return Said(**json.loads(self._process.stdout.readline()))


@contextlib.contextmanager
def interpreter(python: str, env: Mapping[str, str], cwd: Path | None = None) -> Iterator[Interpreter]:
    """A process of a Python, while the block runs."""
    process = subprocess.Popen(
        [python, "-P", __file__],  # without its folder, which has packages of the project's names
        env=env,
        cwd=cwd,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with process:
        yield Interpreter(process)
        assert process.stdin
        process.stdin.close()


def output(path: str) -> dict[str, str]:
    """What the program of a file prints."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            runpy.run_path(path, run_name="__main__")
        except BaseException:  # noqa: BLE001 - a program's failure is what the tests look at
            traceback.print_exc()
    return {"stdout": out.getvalue(), "stderr": err.getvalue()}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(output(line.strip())), flush=True)
