from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import programs

HERE = Path(__file__).parent
Evaluate = Callable[..., list[Path]]


@pytest.fixture(scope="package")
def interpreter():
    """A process that runs inspect_ai's commands: importing it takes seconds."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("OPENAI_")}
    with programs.interpreter(sys.executable, env, cwd=HERE) as running:
        yield running


@pytest.fixture(scope="package")
def evaluate(served, interpreter, tmp_path_factory) -> Evaluate:
    """`evaluate(*options)`: `inspect eval`, or `retry`; gives the logs.

    `env` is added to the environment; an evaluation with `fails` may end in an error.
    """

    def run(*options: str, retry: bool = False, fails: bool = False, **env: str) -> list[Path]:
        folder = tmp_path_factory.mktemp("logs")
        command = ["inspect", "eval-retry" if retry else "eval", *options]
        command += ["--log-dir", str(folder / "logs"), "--display", "none"]
        if not retry:
            command += ["--model", "vitrine/vitrine-demo", "--model-base-url", served.base_url]
            command += ["--temperature", "0", "--max-tokens", "96"]
        lines = "import os, runpy, sys", f"os.environ |= {env}", f"sys.argv = {command}"
        (folder / "run.py").write_text("\n".join([*lines, "runpy.run_module('inspect_ai', run_name='__main__')"]))
        done = interpreter.run(folder / "run.py")
        assert fails or done.stderr.rstrip().endswith("SystemExit: 0"), done
        return sorted((folder / "logs").iterdir())

    return run


@pytest.fixture(scope="package")
def unrecorded(evaluate) -> Path:
    """A log of a task without capture."""
    (path,) = evaluate("tasks.py@choices")
    return path


@pytest.fixture(scope="package")
def logs(evaluate) -> dict[str, Path]:
    """The logs of all tasks, recorded at one point, by the task's name."""
    recorded = ["-M", 'capture={"layers": [2], "sites": ["output"]}']
    return {path.name.split("_")[1]: path for path in evaluate("tasks.py", *recorded)}
