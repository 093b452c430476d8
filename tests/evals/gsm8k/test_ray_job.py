"""The `ray job submit` of docs/evaluation.md on a running cluster."""

import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
from ray._private.ray_constants import get_runtime_env_default_excludes
from ray._private.runtime_env.packaging import create_package

ROOT = Path(__file__).parents[3]
DOCUMENT = (ROOT / "docs" / "evaluation.md").read_text()
(COMMAND,) = map(shlex.split, re.findall(r"^ray job submit .*", DOCUMENT, re.MULTILINE))
AGENT_S = 120  # that Ray's own agent may take to start beside the dashboard
LARGEST_UPLOAD = 64 << 20  # bytes; Ray refuses half a GiB


def submit(served: Any, results: Path) -> "subprocess.CompletedProcess[str]":
    """The job, with nothing of the evaluator but what the working directory holds."""
    env = {name: value for name, value in served.cluster.env.items() if name not in ("PYTHONPATH", "RAY_ADDRESS")}
    env["RAY_API_SERVER_ADDRESS"] = served.cluster.dashboard
    few = ["--base-url", served.base_url, "--samples", "2", "--max-tokens", "32", "--mode", "no-tools"]
    end = time.monotonic() + AGENT_S
    while True:
        command = [*COMMAND, *few, "--results-dir", str(results)]
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
        if "No available agent to submit job" not in done.stderr or time.monotonic() > end:
            return done


@pytest.mark.long  # waits for the agent of Ray's dashboard; test_run.py runs the same command without a job
def test_a_job_leaves_its_results_where_it_says(
    served: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "results"
    done = submit(served, results)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"results go to {results} (on {platform.node()}" in done.stdout
    summary = json.loads((results / "summary.json").read_text())
    assert summary["counts"] == {"problems": 2, "conditions": 1, "samples": 2, "failed": 0, "missing": 0}
    assert summary["activations"]["not_stored"] == 0
    code = done.stdout[done.stdout.index("from vitrine import load") :].split("\n")[:3]
    exec("\n".join(code), {})  # noqa: S102 - as a user's Python runs it
    assert capsys.readouterr().out.startswith("(")


@pytest.mark.skipif(not shutil.which("git"), reason="git says which files are the project's")
def test_what_is_uploaded_is_small_and_without_what_git_leaves_out(tmp_path: Path) -> None:
    import warnings

    copy = tmp_path / "project"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(copy)], check=True)
    for name in ("results/run/samples", ".venv/lib", "activations/session"):
        (copy / name).mkdir(parents=True)
        (copy / name / "large").write_bytes(os.urandom(1024))
    package = tmp_path / "package.zip"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        create_package(str(copy), package, include_gitignore=True, excludes=get_runtime_env_default_excludes())
    assert package.stat().st_size < LARGEST_UPLOAD
    names = zipfile.ZipFile(package).namelist()
    assert any(name.endswith("evals/variants.yaml") for name in names)
    assert any(name.endswith("weights/model.safetensors") for name in names)
    assert not [name for name in names if name.endswith("/large") or ".git/" in name]
