from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
Evaluate = Callable[..., list[Path]]


@pytest.fixture(scope="package")
def evaluate(served, tmp_path_factory) -> Evaluate:
    """`evaluate(*options)`: `inspect eval`, or `retry`, in a process of its own; gives the logs.

    `env` is added to the environment; an evaluation with `fails` may end in an error.
    """
    pytest.importorskip("inspect_ai", reason="inspect_ai is not installed: make lint")

    def run(*options: str, retry: bool = False, fails: bool = False, **env: str) -> list[Path]:
        folder = tmp_path_factory.mktemp("logs")
        command = [sys.executable, "-m", "inspect_ai", "eval-retry" if retry else "eval", *options]
        command += ["--log-dir", str(folder), "--display", "none"]
        if not retry:
            command += ["--model", "vitrine/vitrine-demo", "--model-base-url", served.base_url]
            command += ["--temperature", "0", "--max-tokens", "96"]
        env |= {name: value for name, value in os.environ.items() if not name.startswith("OPENAI_")}
        done = subprocess.run(command, cwd=HERE, env=env, capture_output=True, text=True, timeout=240)
        assert fails or done.returncode == 0, done.stdout + done.stderr
        return sorted(folder.iterdir())

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
