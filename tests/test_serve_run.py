"""`serve run serve_app:build_app name=value ...` on two cores, next to another application."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading

import click
import httpx
import pytest
from ray import serve

from deployments.activations import read_run
from deployments.demo_model import WEIGHTS
from serve_app import build_app
from tests import waiting
from tests.conftest import ROOT, healthy, until

RUN = ["serve", "run", "--name=second", "--route-prefix=/second", "serve_app:build_app"]
OPTIONS = [
    f"model={WEIGHTS}",
    "model_id=named/second",
    "num_replicas=2",
    "threads=1",
    "dtype=float32",
    "max_seq_len=2048",
]


@pytest.fixture(scope="module")
def second(served):
    """The root of an application with two replicas of a model from a directory."""
    root, log = f"{served.root}/second", served.cluster.directory / "second.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*RUN, *OPTIONS], cwd=ROOT, env=served.cluster.env, stdout=out, stderr=out, start_new_session=True
        )
    try:
        until(lambda: healthy(root), process, log)
        yield root
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # on SIGINT it would shut down all of Serve
        process.wait()
        serve.delete("second")


@pytest.mark.long  # three replicas on two cores
def test_the_options_are_those_that_were_given(second, eventually):
    # A list is without a model that takes seconds to describe itself.
    (model,) = eventually(lambda: httpx.get(f"{second}/v1/models", timeout=30).json()["data"])
    assert (model["id"], model["max_model_len"]) == ("named/second", 2048)
    wanted = {"named/second": {"RUNNING": 2}}
    eventually(lambda: httpx.get(f"{second}/health", timeout=30).json()["replicas"], lambda seen: seen == wanted)
    assert httpx.get(f"{second}/v1/models/named/second", timeout=30).status_code == 200


@pytest.mark.long
def test_an_evaluation_finishes_beside_three_replicas_on_two_cores(second, served, tmp_path):
    command = ["python", "-m", "evals.gsm8k", f"--base-url={second}/v1", "--samples=4", "--mode=no-tools"]
    command += ["--max-tokens=16", f"--results-dir={tmp_path / 'results'}"]
    done = subprocess.run(command, env=served.cluster.env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_application_that_is_deleted_finishes_what_it_streams_and_stores_it(served, request):
    given = {"model_id": "named/third", "threads": "1", "num_cpus": "0.1", "max_seq_len": "1024"}
    request.addfinalizer(lambda: serve.delete("third"))  # also where the test fails before it deletes it
    serve.run(build_app(given), name="third", route_prefix="/third")
    root = f"{served.root}/third"
    waiting.until(lambda: healthy(root))
    model = httpx.get(f"{root}/v1/models/named/third", timeout=30).json()
    assert (model["id"], model["max_model_len"]) == ("named/third", 1024)
    body = {"model": "named/third", "prompt": "Tom has", "max_tokens": 800, "ignore_eos": True, "stream": True}
    body |= {"store_activations": True, "session_id": "drained"}
    with httpx.stream("POST", f"{root}/v1/completions", json=body, timeout=120) as answer:
        lines = (line.removeprefix("data: ") for line in answer.iter_lines() if line)
        next(lines)  # it has begun
        deletion = threading.Thread(target=serve.delete, args=("third",))
        deletion.start()
        events = list(lines)
    deletion.join()
    assert events[-1] == "[DONE]"
    meta = json.loads(events[-2])["activations_meta"]
    assert meta["status"] == "stored"
    run = meta["runs"][0]
    uri = run["points"]["layers.2.input_layernorm.output"]["uri"]
    assert len(read_run(uri, run_id=run["run_id"]).token_ids) == run["tokens"] == run["prompt_tokens"] + 800


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="only Linux schedules batch work")
@pytest.mark.parametrize("running", [None, "127.0.0.1:6379"])
def test_the_processes_of_a_ray_that_serve_run_starts_do_not_interrupt_the_model(running, monkeypatch):
    monkeypatch.setattr("serve_app.read_ray_address", lambda: running)
    before = os.sched_getscheduler(0)
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    try:
        with click.Context(click.Command("run"), info_name="run"):
            build_app({"model_id": "mine", "num_gpus": "0"})
        child = [sys.executable, "-c", "import os; print(os.sched_getscheduler(0))"]
        policy = int(subprocess.run(child, capture_output=True, text=True, check=True).stdout)
    finally:
        os.sched_setscheduler(0, before, os.sched_param(0))
    assert policy == (os.SCHED_OTHER if running else os.SCHED_BATCH)


def test_a_bad_option_ends_serve_run_with_its_name(served):
    command = [*RUN, "modle=x", "num_replicas=none"]
    done = subprocess.run(command, env=served.cluster.env, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert "modle" in done.stderr
    assert "num_replicas" in done.stderr
