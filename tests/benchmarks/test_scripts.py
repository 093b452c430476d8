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
SMALL = ["--model=tiny", "--requests=2", "--new-tokens=4", "--rounds=1", "--threads=1"]

pytestmark = pytest.mark.slow


def run(script: str, results: Path, *options: str, env: dict[str, str] | None = None) -> tuple[str, dict]:
    """What a benchmark prints, and the numbers it keeps."""
    command = [sys.executable, "-m", f"benchmarks.{script}", f"--results={results}", *options]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert "Traceback" not in done.stderr, done.stderr
    found = json.loads(results.with_suffix(".json").read_text())
    # Behind its peers it may be at this size, but not wrong.
    assert not [reason for reason in found["failed"] if "differ" in reason], found["failed"]
    assert done.returncode == bool(found["failed"]), done.stdout + done.stderr
    assert results.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    return done.stdout, found


@pytest.mark.long
def test_the_engine_is_measured_beside_its_peers(tmp_path):
    options = ["--wide-model=tiny", "--dtype=float32", "--dtype=bfloat16"]
    printed, found = run("engine", tmp_path / "engine", *SMALL, *options)
    case = found["cases"]["tiny, float32, cpu"]
    assert set(found["cases"]["tiny, bfloat16, cpu"]) == set(case)
    assert set(case) == {"ways", "arrivals", "gaps", "wide", "floor"}
    for part in ("ways", "arrivals", "wide"):
        for name, spread in case[part]["ratios"].items():
            assert spread["lowest"] <= spread["median"] <= spread["highest"]
            assert name in printed
    assert all(same == of for same, of in case["ways"]["same_outputs"].values())
    assert case["gaps"]["all at once"]["steps"]["median"] == 1
    parts = case["floor"]["parts"]["greedy"]
    assert max(parts, key=parts.get) == "forward"
    assert case["floor"]["operations"]["matrix products"]["count"] >= 7 * 2 + 1  # those of two layers, and the head
    assert "times the floor" in printed


@pytest.mark.long
def test_ways_to_collect_are_measured_and_store_the_same_rows(tmp_path):
    ways = ["script", "engine", "collect", "served", "requests"]
    options = ["--model=vitrine-demo", "--dtype=float32", "--prompts=3", "--rounds=1", "--threads=1"]
    _, found = run("activations.collecting", tmp_path / "collecting", *options, "--way", *ways)
    (case,) = found["cases"].values()
    for part in ("short prompts, last token", "long prompts, all tokens"):
        assert len(case[part]["ways"]) == len(ways)
        assert sum(name.startswith(f"{part}, 100% of the rows") for name in case) == len(ways) - 2
    assert not found["failed"]  # as where rows differ


@pytest.mark.long
def test_reading_is_measured_beside_a_memory_map_and_leaves_no_rows(tmp_path):
    results = tmp_path / "results" / "reading"
    options = ["--bytes=2e7", "--segment-bytes=6000000", "--rounds=1", "--batch-size=100", f"--directory={tmp_path}"]
    _, found = run("activations.reading", results, *options)
    assert not [reason for reason in found["failed"] if "not those that were written" in reason]
    (case,) = found["cases"].values()
    assert "rows, shuffled / map, shuffled" in case["reading"]["ratios"]
    assert [item.name for item in tmp_path.iterdir()] == ["results"]


@pytest.mark.long
def test_serving_is_measured_beside_the_engine_and_leaves_nothing_running(tmp_path):
    mark = {"STARTED_BY": str(tmp_path)}  # children inherit it
    printed, found = run("serving", tmp_path / "serving", *SMALL, "--dtype=float32", env={**os.environ, **mark})
    case = found["cases"]["tiny, float32"]
    assert "served, whole / engine in process" in case["ways"]["ratios"]
    assert all(same == of for same, of in case["ways"]["same_outputs"].values())
    assert case["latencies"]["gaps"]["tokens"] >= 1
    assert case["processor_ms_per_token"]["streamed"]["ModelReplica"] >= 0
    assert "first token" in printed
    assert not [process.cmdline() for process in psutil.process_iter() if marked(process, str(tmp_path))]


def marked(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get("STARTED_BY") == mark
    except psutil.Error:  # it has ended, or is another user's
        return False


@pytest.mark.long
def test_writing_is_measured_beside_the_disk_and_leaves_nothing(tmp_path):
    results = tmp_path / "results" / "writing"
    options = ["--bytes=2e7", "--rounds=1", "--at-once=2", f"--directory={tmp_path}"]
    _, found = run("activations.writing", results, *options)
    (case,) = found["cases"].values()
    required = {"writer / disk", "writer, long / disk"}
    told = {"writer, small / disk", "writer, apart / disk", "disk, summed / disk", "writer / disk, summed"}
    assert set(case["writing"]["ratios"]) == required | told
    assert [item.name for item in tmp_path.iterdir()] == ["results"]


@pytest.mark.long
def test_the_page_is_measured_in_a_browser(tmp_path):
    results = tmp_path / "page"
    small = ["--tokens=100", "--speed=200", "--seconds=3", "--rounds=1"]
    command = [sys.executable, "-m", "benchmarks.page", *small, f"--results={results}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    if "to open the page with" in done.stderr:
        pytest.skip(done.stderr)
    assert "Traceback" not in done.stderr, done.stderr
    found = json.loads(results.with_suffix(".json").read_text())
    assert done.returncode == bool(found["failed"]), done.stdout + done.stderr
    *opened, coming, there = found["cases"]["page"].values()
    assert len(opened) == 4
    for views in opened:
        assert 0 < views["lowest"] <= views["median"] <= views["highest"]
    # Of two windows the first is there before the scrolling begins; the second time there is nothing to read.
    assert (coming["windows read"], there["windows read"]) == (1, 0)
    assert coming["pixels"] >= there["pixels"] > 0
    for scroll in (coming, there):
        assert 1 < scroll["frames"] < 1.1 * 3 * 60  # a screen's, which draws no more
        assert 1000 / 66 < 1000 / scroll["frames per second"] <= scroll["longest gap, ms"] < 3000
