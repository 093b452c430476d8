"""Each benchmark runs from end to end on a tiny model, whose numbers mean nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
SMALL = ["--model=tiny", "--requests=2", "--new-tokens=4"]

pytestmark = [pytest.mark.slow, pytest.mark.long]


def run(script: str, results: Path, *options: str, env: dict[str, str] | None = None) -> dict:
    """The cases that a benchmark keeps; behind its peers it may be at this size, but not wrong."""
    command = [sys.executable, "-m", f"benchmarks.{script}", f"--results={results}", "--rounds=1", *options]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert "Traceback" not in done.stderr, done.stderr
    found = json.loads(results.read_text())
    assert not [reason for reason in found["failed"] if "less than" not in reason]
    assert done.returncode == bool(found["failed"]), done.stdout + done.stderr
    return found["cases"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_engine_is_measured_beside_its_peers(tmp_path, dtype):
    cases = run("engine", tmp_path / "engine.json", *SMALL, f"--dtype={dtype}")
    assert len(cases[f"tiny, {dtype}, cpu"]["tokens/s"]) == 8


def test_ways_to_collect_are_measured(tmp_path):
    cases = run("activations.collecting", tmp_path / "found.json", "--model=vitrine-demo", "--prompts=3")
    assert [len(case["tokens/s"]) for case in cases.values()] == [4, 4]


def test_replicas_behind_one_ingress_are_measured(tmp_path):
    sizes = ["--replicas=2", "--rows=2", "--step-ms=20", "--new-tokens=4", "--seconds=3"]
    together, costs = run("scaling", tmp_path / "found.json", *sizes).values()
    assert len(together["ratios"]) == 2
    assert len(costs["tokens/s"]) == 4


def test_serving_is_measured_beside_the_engine_and_leaves_nothing_running(tmp_path):
    env = {**os.environ, "STARTED_BY": str(tmp_path)}  # children inherit it
    cases = run("serving", tmp_path / "found.json", *SMALL, "--beside", "transformers", env=env)
    assert "vitrine, streamed / transformers, streamed" in cases["tiny, float32"]["ratios"]
    assert not [process.cmdline() for process in psutil.process_iter() if marked(process, str(tmp_path))]


def marked(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get("STARTED_BY") == mark
    except psutil.Error:  # it has ended, or is another user's
        return False


@pytest.mark.parametrize("script", ["reading", "writing"])
def test_the_store_is_measured_and_leaves_no_rows(tmp_path, script):
    results = tmp_path / "found.json"
    (case,) = run(f"activations.{script}", results, "--bytes=2e7", f"--directory={tmp_path}").values()
    assert len(case["ratios"]) == 2
    assert [item.name for item in tmp_path.iterdir()] == [results.name]
