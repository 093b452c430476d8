"""The environment of the clients whose pins conflict with this project's, and how to run scripts in it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import programs

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
UNREACHABLE = re.compile(r"ConnectTimeout|NewConnectionError|ProxyError|ReadTimeout|NameResolutionError")


@pytest.fixture(scope="session")
def clients(served, tmp_path_factory) -> dict[str, str]:
    """Environment variables with which the clients are found, and find the served model."""
    made = subprocess.run(
        ["make", ".venv-clients/.ready", f"PYTHON={sys.executable}"], cwd=ROOT, capture_output=True, text=True
    )
    if made.returncode and (reason := UNREACHABLE.search(made.stdout + made.stderr)):
        pytest.skip(f"the package registry cannot be reached: {reason[0]}")
    assert made.returncode == 0, made.stdout + made.stderr
    # Ours would put this project's modules and Ray's cluster into theirs.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "RAY_"))}
    return inherited | {
        "PATH": f"{ROOT / '.venv-clients' / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path_factory.mktemp("hub")),
        "OPENAI_API_KEY": "unused",
        "OPENAI_BASE_URL": served.base_url,
    }


@pytest.fixture(scope="package")
def interpreter(clients, tmp_path_factory) -> Iterator[programs.Interpreter]:
    """A process of the clients' Python: importing a client takes seconds."""
    env = clients | {"INSPECT_LOG_DIR": str(tmp_path_factory.mktemp("logs"))}
    with programs.interpreter(str(ROOT / ".venv-clients" / "bin" / "python"), env, cwd=ROOT) as running:
        yield running


@pytest.fixture(scope="package")
def run_command(interpreter, tmp_path_factory) -> Callable[..., programs.Said]:
    """`run_command(how, *words, first="")`: what `python` with these arguments prints, in the shared process.

    `how` is the call of `runpy` that the first of the words is given to; `first` is code that is run before it.
    """

    def run(how: str, *words: object, first: str = "") -> programs.Said:
        program = tmp_path_factory.mktemp("command") / "program.py"
        argv = [str(word) for word in words]
        lines = first, "import runpy, sys", f"sys.argv = {argv}", f"runpy.{how}(sys.argv[0], run_name='__main__')"
        program.write_text("\n".join(lines))
        said = interpreter.run(program)
        assert "Traceback" not in said.stderr or said.stderr.rstrip().endswith("SystemExit: 0"), said
        return said

    return run


@pytest.fixture(scope="session")
def evaluated(served, tmp_path_factory) -> dict[str, dict[str, Any]]:
    """What `evals.gsm8k` says of the first 20 problems without tools: by question, the sample."""
    results = tmp_path_factory.mktemp("evaluated") / "results"
    command = ["python", "-m", "evals.gsm8k", "--base-url", served.base_url, "--samples", "20", "--mode", "no-tools"]
    done = subprocess.run(
        [*command, "--results-dir", str(results)], cwd=ROOT, env=served.cluster.env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    samples = [json.loads(path.read_text()) for path in (results / "samples").iterdir()]
    assert len(samples) == 20
    return {sample["question"]: sample for sample in samples}
