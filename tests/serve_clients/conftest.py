"""The environment of the clients whose pins conflict with this project's, and how to run scripts in it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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


@pytest.fixture(scope="session")
def run_script(clients) -> Callable[..., Any]:
    """Run one of this folder's scripts as a process of its own; gives the JSON of its last line."""

    def run(script: str, *arguments: object) -> Any:
        done = subprocess.run(
            ["python", HERE / script, *map(str, arguments)], env=clients, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


@pytest.fixture(scope="session")
def evaluated(served, tmp_path_factory) -> dict[str, dict[str, dict[str, Any]]]:
    """What `evals.gsm8k` says of the first 20 problems: by mode and question, the sample."""
    results = tmp_path_factory.mktemp("evaluated") / "results"
    command = ["python", "-m", "evals.gsm8k", "--base-url", served.base_url, "--samples", "20"]
    done = subprocess.run(
        [*command, "--results-dir", str(results)], cwd=ROOT, env=served.cluster.env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, dict[str, dict[str, Any]]] = {"no-tools": {}, "with-tools": {}}
    for path in (results / "samples").iterdir():
        sample = json.loads(path.read_text())
        found[sample["mode"]][sample["question"]] = sample
    assert [len(samples) for samples in found.values()] == [20, 20]
    return found
