"""A session is pulled piece by piece: what came stays, another call goes on, a failure has its reason."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from made import make_results
from stored import SESSION, Store, points

from deployments.activations import load, runs
from evals.config import Config, EvalError
from evals.gsm8k.summary import conclude
from evals.results import transfer as transferring
from evals.results.results import read_json
from evals.results.transfer import transfer
from vitrine.connection import transport
from vitrine.runs import fetching


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setattr(transferring, "PAGE", 3)
    monkeypatch.setattr(transferring, "PIECE_BYTES", 5400)  # two runs; the first alone, which has the file's head
    with Store(tmp_path / "store") as running:
        for run in range(5):
            running.record(f"r{run}", points(run, 4 + run))
        yield running


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """No time passes between two attempts."""
    monkeypatch.setattr(transport, "_sleep", lambda seconds: asyncio.sleep(0))


def test_all_runs_of_the_session_arrive_bit_for_bit(store: Store, tmp_path: Path) -> None:
    results = tmp_path / "results"
    found = transfer(results, store.base_url, SESSION)
    folder = results / found["path"]
    assert (found["path"], found["files"], found["runs"]) == (f"activations/{SESSION}", 3, 5)
    assert found["bytes"] == sum(file.stat().st_size for file in folder.iterdir())
    for run in range(5):
        there = load(folder, f"r{run}")
        assert all(torch.equal(there[name], values) for name, values in points(run, 4 + run).items())
    assert len(store.requests) == 3  # each piece is within the file's beginning


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
    with pytest.raises(EvalError, match=f"{SESSION} were not all transferred: .*HTTP 503: run: the store does"):
        transfer(tmp_path, store.base_url, SESSION)
    assert len(runs(tmp_path / "activations" / SESSION)) == 3
    assert not (tmp_path / "activations" / "transferred.json").exists()
    found = transfer(tmp_path, store.base_url, SESSION)
    assert len(store.requests) == 3
    assert {run.run_id for run in runs(tmp_path / found["path"])} == whole | {"r9"}
    assert transfer(tmp_path, store.base_url, SESSION) == found
    assert len(store.requests) == 3
    assert {path.name for path in (tmp_path / "activations").iterdir()} == {SESSION, "transferred.json"}
    assert json.loads((tmp_path / "activations" / "transferred.json").read_text()) == found


@pytest.mark.usefixtures("hurried")
def test_a_server_that_comes_back_costs_a_wait_and_nothing_else(store: Store, tmp_path: Path) -> None:
    store.refuse, store.refuse_pages, store.cut = 9, 9, 1
    assert transfer(tmp_path, store.base_url, SESSION, retries=1, max_outage=60.0)["runs"] == 5
    assert len(store.requests) == 3 + 9 + 1
    for run in range(5):
        there = load(tmp_path / "activations" / SESSION, f"r{run}")
        assert all(torch.equal(there[name], values) for name, values in points(run, 4 + run).items())


@pytest.mark.parametrize("how", ["refuse", "refuse_pages"])
def test_a_server_that_stays_away_is_waited_for_as_long_as_is_said(store: Store, tmp_path: Path, how: str) -> None:
    setattr(store, how, 1_000_000)
    with pytest.raises(EvalError, match="503.*the store does not answer"):
        transfer(tmp_path, store.base_url, SESSION, retries=8, max_outage=0.1)
    assert getattr(store, how) == 1_000_000 - 2


@pytest.mark.usefixtures("hurried")
def test_a_server_that_is_busy_is_asked_as_often_as_is_said(store: Store, tmp_path: Path) -> None:
    store.refuse, store.status = 3, 429
    assert transfer(tmp_path, store.base_url, SESSION, retries=3)["runs"] == 5
    store.record("r9", points(9, 3))
    store.refuse = 4
    with pytest.raises(EvalError, match="429: run: the store does not answer"):
        transfer(tmp_path, store.base_url, SESSION, retries=3)
    assert store.refuse == 0


def test_a_download_that_breaks_off_each_time_comes_to_an_end(store: Store, tmp_path: Path) -> None:
    store.cut = 1_000_000
    with pytest.raises(EvalError, match="does not answer: .*closed connection"):
        transfer(tmp_path, store.base_url, SESSION, max_outage=0.1)
    assert len(store.requests) == 2


@pytest.mark.usefixtures("hurried")
def test_a_download_that_breaks_off_goes_on_with_the_range_that_it_broke_off_in(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "PAGE_BYTES", 2000)
    monkeypatch.setattr(fetching, "HEAD_BYTES", 500)  # too few: more are asked for
    store.cuts = {3, 5}
    assert transfer(tmp_path, store.base_url, SESSION, retries=1, max_outage=60.0)["runs"] == 5
    assert store.requests[:4] == ["bytes=0-499", "bytes=500-2499", "bytes=2500-3999", "bytes=2500-3999"]
    assert store.requests.count("bytes=0-499") == 3  # one for each piece
    for run in range(5):
        there = load(tmp_path / "activations" / SESSION, f"r{run}")
        assert all(torch.equal(there[name], values) for name, values in points(run, 4 + run).items())


def test_runs_that_are_not_what_the_server_wrote_are_a_stated_reason(store: Store, tmp_path: Path) -> None:
    store.sends = lambda data: data.replace(b"\x01", b"\x02")
    with pytest.raises(EvalError, match=f"activations of session {SESSION} were not all transferred"):
        transfer(tmp_path, store.base_url, SESSION)
    assert not list((tmp_path / "activations" / SESSION).glob("*.arrow"))


@pytest.mark.parametrize("status", [400, 404, 500])
def test_what_a_server_refuses_is_asked_once(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setattr(transport, "_sleep", lambda seconds: pytest.fail("it was waited for"))
    store.refuse, store.status = 1_000_000, status
    with pytest.raises(EvalError, match=f"{status}: run: the store does not answer"):
        transfer(tmp_path, store.base_url, SESSION, retries=8, max_outage=60.0)
    assert len(store.requests) == 1


def test_a_key_that_no_header_holds_is_refused_and_not_shown(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret\r")
    with pytest.raises(EvalError, match="^OPENAI_API_KEY has characters that an HTTP header cannot hold$"):
        transfer(tmp_path, store.base_url, SESSION, max_outage=60.0)


@pytest.mark.parametrize(("session", "reason"), [("another", "404"), ("../up", "must be 1 to 128 letters")])
def test_a_session_that_is_none_is_a_stated_reason(store: Store, tmp_path: Path, session: str, reason: str) -> None:
    with pytest.raises(EvalError, match=reason):
        transfer(tmp_path, store.base_url, session)


def test_a_server_that_is_away_is_a_stated_reason(tmp_path: Path) -> None:
    with pytest.raises(EvalError, match="does not answer"):
        transfer(tmp_path, "http://127.0.0.1:9/v1", SESSION, max_outage=0.1)


@pytest.mark.parametrize("page", [{"runs": []}, {"runs": [{"run_id": "r0", "file": "x.arrow", "bytes": 1}]}])
def test_a_server_that_has_more_runs_for_ever_and_lists_none_is_a_stated_reason(
    store: Store, tmp_path: Path, page: dict[str, Any]
) -> None:
    store.lists = lambda found: found | page | {"has_more": True}
    with pytest.raises(EvalError, match="says that there are more runs than [01], and lists none of them"):
        transfer(tmp_path, store.base_url, SESSION)


@pytest.mark.parametrize("page", [{}, {"runs": None}, {"runs": [{}]}, {"runs": 7}])
def test_a_page_that_lists_no_runs_is_a_stated_reason(store: Store, tmp_path: Path, page: Any) -> None:
    store.lists = lambda found: page
    with pytest.raises(EvalError, match="lists no runs: does the server record activations"):
        transfer(tmp_path, store.base_url, SESSION)


def test_runs_without_their_places_are_a_stated_reason(store: Store, tmp_path: Path) -> None:
    store.lists = lambda found: found | {"runs": [{"run_id": run["run_id"]} for run in found["runs"]]}
    with pytest.raises(EvalError, match="does not list where runs lie in their files"):
        transfer(tmp_path, store.base_url, SESSION)


def test_runs_that_are_listed_and_not_sent_are_a_stated_reason(store: Store, tmp_path: Path) -> None:
    store.lists = lambda found: (
        found | {"runs": [run | {"run_id": "r8"} if run["run_id"] == "r3" else run for run in found["runs"]]}
    )
    with pytest.raises(EvalError, match="not all transferred: the server lists r8, and sent no such run"):
        transfer(tmp_path, store.base_url, SESSION)
    assert not (tmp_path / "activations" / "transferred.json").exists()


@pytest.mark.usefixtures("hurried")
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
            base_url="http://127.0.0.1:9/v1",  # as it was when the run began
            max_outage=0.0,
        )
        config = Config.model_validate(read_json(results / "config.json")["config"])
        store.refuse_pages = 1
        kept = conclude(results, None, config.model_copy(update={"base_url": store.base_url, "max_outage": 60.0}))
        assert (kept["incomplete"], kept["activations"]["transferred"]["runs"]) == (None, 24)
        gone = next((results / "samples").iterdir())
        sample = json.loads(gone.read_text())
        sample["turns"][0]["activations"]["runs"][0]["run_id"] = "deleted"
        gone.write_text(json.dumps(sample))
        for _ in range(2):  # also of what was transferred before
            assert conclude(results, None)["incomplete"] == ("1 of 4 recorded runs are not on the server any more")
