"""Monitors of a replica: attached whatever a request says, only of the operator's readouts, logged and stored."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from deployments.accounts import Account
from deployments.activations.actors.store import ActivationStore
from deployments.activations.reader.loading import read_run
from deployments.engine.request import GREEDY, Finished
from deployments.job import Job
from deployments.messages import End, Refusal
from deployments.options import DEMO, Options
from deployments.points.capture import Capture
from deployments.readouts.files import define
from deployments.readouts.spec import AskedReadout
from deployments.readouts.values import Readout
from deployments.replica import monitoring
from deployments.replica.replica import ModelReplica
from tests.store_handle import Handle

sys.path.append(str(Path(__file__).parent.parent / "readouts"))  # importlib mode adds no folder
from saes_by_hand import linear

POINT = "layers.3.output"
OWN, OTHER = (linear(192, seed=seed, model=DEMO, point=POINT, activation="none") for seed in (0, 1))
BOB = Account("bob", is_admin=False)


@pytest.fixture
def serve(tmp_path, monkeypatch):
    """`serve(*monitors)`: what answers a job on a replica with these monitors, whose log is in `tmp_path / "log"`."""
    monkeypatch.setenv("VITRINE_HOME", str(tmp_path))
    store, made = ActivationStore(str(tmp_path / "store")), []
    for data, account in ((OTHER, BOB), (OWN, Account("ops", is_admin=False))):
        (tmp_path / "sent").write_bytes(data)
        asyncio.run(store.client_data("readouts", "put", tmp_path / "sent", None, 1 << 20, account))

    def serve(*monitors: dict[str, Any]) -> Any:
        options = Options(dtype="float32", threads=1, monitors=monitors, monitor_log=str(tmp_path / "log"))
        made.append(ModelReplica.func_or_class(options, store=Handle(store)))

        def ask(**fields: Any) -> Any:
            job = Job("job", prompts=["Tom has 3 boxes"], max_tokens=6, ignore_eos=True, sampling=GREEDY, **fields)
            return asyncio.run(made[-1].complete(job))[-1]

        return ask

    def close() -> None:
        while made:
            made.pop().__del__()

    serve.close = close
    yield serve
    close()
    store._writer.close()


def test_an_answer_is_read_by_the_operators_readout_tagged_stored_and_logged(serve, tmp_path):
    ask = serve(
        {"readout": "truth", "owner": "ops", "above": -1e9, "name": "always"},
        {"readout": "truth", "owner": "ops", "above": 1e9, "name": "never"},
        {"readout": "truth", "owner": "ops", "above": -1e9, "name": "ends", "for": 3, "do": "stop"},
    )
    capture = Capture(points=[POINT], dtype="float32", tags={"by": "hand"})
    end = ask(account=BOB, capture=capture, session_id="s", readouts=(AskedReadout(name="truth"),))
    assert isinstance(end, End), end
    assert (end.finish_reason, end.completion_tokens, end.stop_reason.monitor) == ("stop", 3, "ends")
    assert {rows.name for rows in end.piece.readouts} == {"truth"}
    run = read_run(end.run.points[POINT]["uri"], run_id=end.run.run_id)
    assert run.facts.tags == {"by": "hand", "monitor.always": "fired", "monitor.ends": "fired"}
    device, start = torch.device("cpu"), run.facts.prompt_tokens
    own, others = (Readout(define(data), device).encode(run[POINT]) for data in (OWN, OTHER))
    torch.testing.assert_close(run["readouts.truth"], others, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(run["readouts.monitor.always"][start:], own[start:], rtol=1e-4, atol=1e-4)
    assert not ask(account=BOB).piece.readouts
    serve.close()
    (log,) = (tmp_path / "log").glob("*.jsonl")
    line, other = map(json.loads, log.read_text().splitlines())
    assert (line["owner"], line["model"], line["run_id"], other["run_id"]) == ("bob", DEMO, end.run.run_id, None)
    always, never = line["monitors"]["always"], line["monitors"]["never"]
    assert (always["fired"], never["fired"]) == (start, None)
    assert always["value"] == never["value"] == pytest.approx(own[start:].max().item(), rel=1e-3)
    assert always["position"] == start + int(own[start:].argmax())


def test_no_request_is_served_without_its_monitor(serve):
    missing = {"readout": "truth", "above": 0.5}  # only bob and ops have one of this name
    refused = serve(missing | {"model": "another", "name": "other"}, missing)(account=BOB)
    assert isinstance(refused, Refusal), refused
    assert (refused.status, refused.code) == (503, "monitor_unavailable")
    assert "option monitors.1" in refused.message


def test_a_log_that_the_disk_holds_up_drops_lines_and_nobody_waits(tmp_path, monkeypatch):
    released, dropped = threading.Event(), []
    monkeypatch.setattr(monitoring, "MOST_LINES", 2)
    monkeypatch.setattr(monitoring.MonitorLog, "_drop", lambda _: dropped.append(1))
    emit = monitoring.RotatingFileHandler.emit
    monkeypatch.setattr(monitoring.RotatingFileHandler, "emit", lambda *args: released.wait(60) and emit(*args))
    first, second = (monitoring.MonitorLog(str(tmp_path), "a/model") for _ in range(2))
    for i in range(9):
        first.add(Job(f"job{i}"), None, Finished(f"job{i}", "stop", []))
    assert 6 <= len(dropped) <= 7  # the thread may hold one
    released.set()
    first.close()
    second.close()
    lines = [path.read_text().splitlines() for path in sorted(tmp_path.glob("*.jsonl"))]
    assert [len(each) for each in lines] == [9 - len(dropped), 0]
    assert json.loads(lines[0][0])["request_id"] == "job0"
