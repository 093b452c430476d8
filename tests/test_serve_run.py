"""`serve run serve_app:build_app name=value ...`, and how a server begins and ends."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading

import click
import httpx
import pytest
from ray import serve

from deployments.activations import read_run
from deployments.activations.facts import StoreError
from deployments.activations.writer import recovery
from deployments.demo_model import WEIGHTS
from deployments.options import Options
from serve_app import build_app
from serve_app.lifecycle import check_free, drain
from tests import waiting
from tests.conftest import ROOT, healthy, until


def test_an_application_that_is_drained_finishes_what_it_streams_and_stores_it(served, request):
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
        deletion = threading.Thread(target=drain, args=("third", 60))
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
    monkeypatch.setattr("serve_app.check_free", lambda *_: None)
    monkeypatch.setattr("serve_app.drain_on_sigterm", lambda _: None)
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


def test_a_port_or_a_store_that_another_server_has_is_an_error_that_names_the_process(tmp_path, monkeypatch):
    monkeypatch.setattr(recovery, "_ENDING_S", 0.0)
    holder = f"process {os.getpid()} "
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as server, pytest.raises(OSError, match=holder):
        check_free("127.0.0.1", server.getsockname()[1], Options(activations_dir=str(tmp_path)))
    lock = recovery.open_directory(tmp_path)
    with pytest.raises(StoreError, match=holder):
        check_free("127.0.0.1", 0, Options(activations_dir=str(tmp_path)))
    os.close(lock)
    check_free("127.0.0.1", 0, Options(activations_dir=str(tmp_path)))


@pytest.mark.long  # one more server
def test_serve_run_takes_its_options_and_ends_by_sigterm_after_the_requests_that_run(served, tmp_path):
    root, log = "http://127.0.0.1:8000", tmp_path / "log"  # the only address of `serve run`
    env = {**served.cluster.env, "VITRINE_HOME": str(tmp_path)}
    del env["RAY_ADDRESS"]
    options = [f"model={WEIGHTS}", "model_id=named/own", "threads=1", "dtype=float32", "max_seq_len=2048"]
    with log.open("wb") as out:
        command = ["serve", "run", "serve_app:build_app", *options]
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=out)
    try:
        until(lambda: healthy(root), process, log)
        (model,) = httpx.get(f"{root}/v1/models", timeout=30).json()["data"]
        assert (model["id"], model["max_model_len"]) == ("named/own", 2048)
        body = {"model": model["id"], "prompt": "Tom has", "max_tokens": 800, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{root}/v1/completions", json=body, timeout=120) as answer:
            lines = (line for line in answer.iter_lines() if line)
            next(lines)
            process.terminate()
            assert [*lines][-1] == "data: [DONE]"
        assert process.wait(60) == 0
    finally:
        process.kill()
    assert "Traceback" not in log.read_text()
