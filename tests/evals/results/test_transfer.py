"""A session is pulled piece by piece: what came stays, another call goes on, a failure has its reason."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from made import make_results
from stored import SESSION, Store, points

from deployments.activations import read_run, runs
from evals.config import EvalError
from evals.gsm8k.summary import conclude
from evals.results import transfer as transferring
from evals.results.transfer import transfer


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setattr(transferring, "PIECE_BYTES", 5400)  # two runs; the first alone, which has the file's head
    with Store(tmp_path / "store") as running:
        for run in range(5):
            running.record(f"r{run}", points(run, 4 + run))
        yield running


def test_all_runs_of_the_session_arrive_bit_for_bit(store: Store, tmp_path: Path) -> None:
    results = tmp_path / "results"
    found = transfer(results, store.base_url, SESSION)
    folder = results / found["path"]
    assert (found["path"], found["files"], found["runs"]) == (f"activations/{SESSION}", 3, 5)
    assert found["bytes"] == sum(file.stat().st_size for file in folder.iterdir())
    for run in range(5):
        there = read_run(folder, f"r{run}")
        assert all(torch.equal(there[name], values) for name, values in points(run, 4 + run).items())


def test_what_came_before_an_interruption_stays_and_the_next_call_goes_on(store: Store, tmp_path: Path) -> None:
    transfer(tmp_path, store.base_url, SESSION)
    store.record("r9", points(9, 3))
    store.requests.clear()
    store.refuse, store.status = 1, 500
    with pytest.raises(EvalError, match=f"{SESSION} were not all transferred: .* 500: run: the store does not answer"):
        transfer(tmp_path, store.base_url, SESSION)
    assert len(runs(tmp_path / "activations" / SESSION)) == 5
    assert not (tmp_path / "activations" / "transferred.json").exists()
    found = transfer(tmp_path, store.base_url, SESSION)
    assert {run.run_id for run in runs(tmp_path / found["path"])} == {*(f"r{run}" for run in range(5)), "r9"}
    asked = len(store.requests)
    assert transfer(tmp_path, store.base_url, SESSION) == found
    assert len(store.requests) == asked
    assert {path.name for path in (tmp_path / "activations").iterdir()} == {SESSION, "transferred.json"}
    assert json.loads((tmp_path / "activations" / "transferred.json").read_text()) == found


def test_runs_that_are_not_what_the_server_wrote_are_a_stated_reason(store: Store, tmp_path: Path) -> None:
    store.sends = lambda data: data.replace(b"\x01", b"\x02")
    with pytest.raises(EvalError, match=f"activations of session {SESSION} were not all transferred"):
        transfer(tmp_path, store.base_url, SESSION)
    assert not list((tmp_path / "activations" / SESSION).glob("*.arrow"))


def test_a_key_that_no_header_holds_is_refused_and_not_shown(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret\r")
    with pytest.raises(EvalError, match="^OPENAI_API_KEY has characters that an HTTP header cannot hold$"):
        transfer(tmp_path, store.base_url, SESSION)


def test_a_session_or_a_server_that_is_not_there_is_a_stated_reason(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transferring, "MAX_OUTAGE_S", 0.0)
    with pytest.raises(EvalError, match="there is no session 'another'"):
        transfer(tmp_path, store.base_url, "another")
    with pytest.raises(EvalError, match="127.0.0.1:9 does not answer"):
        transfer(tmp_path, "http://127.0.0.1:9/v1", SESSION)


def test_a_run_of_a_sample_that_is_not_there_any_more_makes_the_results_incomplete(tmp_path: Path) -> None:
    with Store(tmp_path / "store") as store:
        for run in range(20):  # of an earlier evaluation: as many as there are, and none that counts
            store.record(f"earlier-{run}", points(run, 3))
        results = tmp_path / "results"
        make_results(
            results,
            4,
            modes=("no-tools",),
            skill=1.0,
            activations=lambda run: store.record(run, points(1, 4)),
            transfer_activations=True,
            base_url="http://127.0.0.1:9/v1",  # as it was when the evaluation began
        )
        kept = conclude(results, None, store.base_url)
        assert (kept["incomplete"], kept["activations"]["transferred"]["runs"]) == (None, 24)
        gone = next((results / "samples").iterdir())
        sample = json.loads(gone.read_text())
        sample["turns"][0]["activations"]["runs"][0]["run_id"] = "deleted"
        gone.write_text(json.dumps(sample))
        assert conclude(results, None)["incomplete"] == ("1 of 4 recorded runs are not on the server any more")
