"""A session is pulled piece by piece: what came stays, another call goes on, a failure has its reason."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from stored import SESSION, Store, points

from deployments.activations import load, runs
from evals import transfer as transferring
from evals.config import EvalError
from evals.transfer import transfer


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setattr(transferring, "PIECE_RUNS", 2)
    monkeypatch.setattr(transferring, "PAGE", 3)
    monkeypatch.setattr(transferring, "ATTEMPTS", 1)
    with Store(tmp_path / "store") as running:
        for run in range(5):
            running.record(f"r{run}", points(run, 4 + run))
        yield running


def test_all_runs_of_the_session_arrive_bit_for_bit(store: Store, tmp_path: Path) -> None:
    results = tmp_path / "results"
    found = transfer(results, store.base_url, SESSION, progress=False)
    folder = results / found["path"]
    assert (found["path"], found["files"], found["runs"]) == (f"activations/{SESSION}", 3, 5)
    assert found["bytes"] == sum(file.stat().st_size for file in folder.iterdir())
    for run in range(5):
        there = load(folder, f"r{run}")
        assert all(torch.equal(there[name], values) for name, values in points(run, 4 + run).items())
    assert [len(request["run"]) for request in store.requests] == [2, 2, 1]


def test_what_came_before_an_interruption_stays_and_the_next_call_goes_on(store: Store, tmp_path: Path) -> None:
    transfer(tmp_path, store.base_url, SESSION)
    whole = {run.run_id for run in runs(tmp_path / "activations" / SESSION)}
    (tmp_path / "activations" / SESSION / "pulled-000002.arrow").unlink()
    left = tmp_path / "activations" / ".piece" / SESSION  # of a process that was killed
    left.mkdir(parents=True)
    (left / "pulled-000001.arrow").write_bytes(b"half")
    store.record("r9", points(9, 3))
    store.requests.clear()
    store.refuse = 1
    with pytest.raises(EvalError, match=f"{SESSION} were not all transferred: 503: the store does not answer"):
        transfer(tmp_path, store.base_url, SESSION)
    assert len(runs(tmp_path / "activations" / SESSION)) == 3
    assert not (tmp_path / "activations" / "transferred.json").exists()
    found = transfer(tmp_path, store.base_url, SESSION)
    assert [request["run"] for request in store.requests] == [["r2", "r3"], ["r2", "r3"], ["r9"]]
    assert {run.run_id for run in runs(tmp_path / found["path"])} == whole | {"r9"}
    assert transfer(tmp_path, store.base_url, SESSION) == found
    assert len(store.requests) == 3
    assert {path.name for path in (tmp_path / "activations").iterdir()} == {SESSION, "transferred.json"}
    assert json.loads((tmp_path / "activations" / "transferred.json").read_text()) == found


def test_a_server_that_comes_back_costs_a_wait_and_nothing_else(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transferring, "ATTEMPTS", 2)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    store.refuse = 1
    assert transfer(tmp_path, store.base_url, SESSION)["runs"] == 5


@pytest.mark.parametrize(("session", "reason"), [("another", "404"), ("../up", "must be 1 to 128 letters")])
def test_a_session_that_is_none_is_a_stated_reason(store: Store, tmp_path: Path, session: str, reason: str) -> None:
    with pytest.raises((EvalError, ValueError), match=reason):
        transfer(tmp_path, store.base_url, session)


def test_a_server_that_is_away_is_a_stated_reason(store: Store, tmp_path: Path) -> None:
    with pytest.raises(EvalError, match="refused"):
        transfer(tmp_path, "http://127.0.0.1:9/v1", SESSION)
