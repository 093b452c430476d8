"""A file's prompts become stored runs, once each, by local engines or through a server."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from deployments.activations import read_run, runs
from deployments.activations.facts import RunInfo
from deployments.collect import Collected, CollectError, collect
from deployments.collect.examples import DataError, Outcome
from deployments.demo_model import WEIGHTS
from deployments.errors import LoadError
from deployments.options import DEMO
from tests.conftest import ROOT, Cluster, Served

POINTS = ["layers.*.output"]
TOO_LONG = "apples " * 5000


def lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def problems(count: int) -> list[dict[str, Any]]:
    return [
        {"prompt": f"Tom has {n} apples" + " and pears" * (n % 7), "label": n % 2 == 0, "group": f"g{n % 5}", "n": n}
        for n in range(count)
    ]


@pytest.fixture(scope="module")
def store(served: Served) -> Iterator[Path]:
    """Of the server that runs in the cluster: every test stores to it, and its sessions are deleted afterwards."""
    directory = served.home / "activations"
    before = {path.name for path in directory.glob("_/*")}
    yield directory
    for session in {path.name for path in directory.glob("_/*")} - before:
        httpx.delete(f"{served.base_url}/activations/session/{session}", timeout=60).raise_for_status()


def by_id(session: Path) -> dict[str, RunInfo]:
    found = list(runs(session))
    assert len({run.sample_id for run in found}) == len(found), "a run is stored once"
    return {str(run.sample_id): run for run in found}


@pytest.fixture
def way(request: pytest.FixtureRequest, served: Served, store: Path) -> dict[str, str]:
    """Where the prompts run: in an engine beside the server, or at the server.

    The engine is told the store: the cluster may have that of another file's application too.
    """
    return {"model": DEMO, "store": str(store)} if request.param == "model" else {"base_url": served.base_url}


@pytest.mark.parametrize("way", ["model", "base_url"], indirect=True)
def test_what_is_stored_of_each_example_and_what_cannot_be_is_named_and_left_out(
    way: dict[str, str], store: Path, tmp_path: Path
) -> None:
    rows: list[Any] = [
        *problems(39),
        {**problems(1)[0], "id": "1"},
        {"messages": [{"role": "user", "content": "How many?"}], "id": "chat"},
        5,
        {"prompt": TOO_LONG, "id": "long"},
    ]
    session = f"collected-{next(iter(way))}"
    seen, steps = list[Outcome](), list[str]()
    data = lines(tmp_path / "d.jsonl", rows)
    told: Any = {"progress": seen.append, "starting": steps.append}
    found = collect(data, session=session, points=POINTS, on_error="skip", **told, **way)

    stored = by_id(store / "_" / session)
    # The fortieth is the first again.
    assert found == Collected(session, 40, 2, found.tokens, found.seconds, found.tokens_per_second, 1)
    failures = [text for outcome in seen for text in outcome.failures]
    assert sorted(text.split(":")[0] for text in failures) == ["d.jsonl, line 42", "d.jsonl, line 43"]
    assert "tokens" in next(text for text in failures if "line 43" in text)
    assert found.tokens == sum(run.tokens for run in stored.values())
    assert found.seconds > 0
    assert [step.split()[0] for step in steps] == (["joining", "loading"] if "model" in way else [])
    assert found.tokens_per_second == pytest.approx(found.tokens / found.seconds)
    assert sum(outcome.runs for outcome in seen) == 40
    assert set(stored) == {*map(str, range(1, 40)), "chat"}
    run = stored["7"]
    assert {name: run.tags[name] for name in ("label", "group", "n")} == {"label": "true", "group": "g1", "n": "6"}
    assert run.text is not None
    assert run.text.endswith("Tom has 6 apples" + " and pears" * 6)

    model = AutoModelForCausalLM.from_pretrained(WEIGHTS, dtype=torch.float32)
    tokens = AutoTokenizer.from_pretrained(WEIGHTS)(rows[6]["prompt"], return_tensors="pt")
    with torch.inference_mode():
        states = model(**tokens, output_hidden_states=True).hidden_states
    rows_of = read_run(store / "_" / session, run.run_id)
    assert rows_of["layers.0.output"].shape == (1, model.config.hidden_size), "the prompt's last token alone"
    torch.testing.assert_close(rows_of["layers.0.output"].float(), states[1][0, -1:], atol=1e-4, rtol=1e-4)


def test_the_same_command_again_stores_nothing(served: Served, store: Path) -> None:
    given: dict[str, Any] = {"session": "again", "points": POINTS, "base_url": served.base_url}
    assert collect(problems(6), **given).runs == 6
    stored = by_id(store / "_" / "again")
    again = collect(problems(6), tokens="last", **given)
    assert (again.runs, again.already_stored, again.tokens_per_second) == (0, 6, 0.0)
    assert by_id(store / "_" / "again").keys() == stored.keys()


@pytest.mark.parametrize("way", [pytest.param("model", marks=pytest.mark.long), "base_url"], indirect=True)
def test_points_that_the_model_has_not_are_refused_at_once(way: dict[str, str]) -> None:
    with pytest.raises(DataError, match=r"--points: .*layers\.0\.none"):
        collect(problems(2), session="refused", points=["layers.0.none"], on_error="skip", **way)


def test_the_first_example_that_cannot_be_stored_ends_the_command(served: Served) -> None:
    rows = [{"prompt": TOO_LONG}, *problems(2)]
    with pytest.raises(CollectError, match="data, row 1: .*; use --on-error skip to skip such examples"):
        collect(rows, session="ended", points=POINTS, base_url=served.base_url)


def test_generated_tokens_are_recorded_where_they_are_asked_for(served: Served, store: Path) -> None:
    given: dict[str, Any] = {"tokens": "all", "max_tokens": 4, "base_url": served.base_url}
    collect(problems(3), session="generated", points=["norm.output"], **given)
    for run in by_id(store / "_" / "generated").values():
        assert run.tokens > run.prompt_tokens
        assert read_run(store / "_" / "generated", run.run_id)["norm.output"].shape[0] == run.tokens


@pytest.mark.long
def test_a_killed_command_goes_on_and_stores_no_run_twice(
    store: Path, cluster: Cluster, tmp_path: Path, eventually: Callable[..., Any]
) -> None:
    data = lines(tmp_path / "d.jsonl", problems(700))
    command = [sys.executable, "-m", "deployments.collect", str(data), "--model", DEMO, "--session", "killed"]
    command += ["--store", str(store), "--points", *POINTS]
    run = subprocess.Popen(command, cwd=ROOT, env=cluster.env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        folder = store / "_" / "killed"
        eventually(lambda: folder.is_dir() and bool(runs(folder)), limit_s=120)
    finally:
        run.send_signal(signal.SIGKILL)
        run.communicate()
    done = subprocess.run(command, cwd=ROOT, env=cluster.env, capture_output=True, text=True, check=True)
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["session"] == "killed"
    assert told["failed"] == 0
    assert told["already_stored"] > 0
    assert told["runs"] > 0, "it was killed before its end"
    assert told["runs"] + told["already_stored"] == 700
    assert len(by_id(store / "_" / "killed")) == 700


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"model": DEMO, "tokens": "first"}, DataError, "--tokens"),
        ({"model": DEMO, "session": "../x"}, DataError, "--session"),
        pytest.param(
            {"model": "smollm2", "options": {"models_dir": "/nowhere"}},
            LoadError,
            "make smollm2",
            marks=pytest.mark.long,  # a replica starts
        ),
        ({"base_url": "http://127.0.0.1:9", "model": DEMO}, DataError, "does not answer"),
        ({}, DataError, "--model"),
        ({"model": DEMO, "max_tokens": -1}, DataError, "--max-tokens"),
        ({"model": DEMO, "points": [""]}, DataError, "--points"),
        ({"model": DEMO, "options": {"frob": "1"}}, DataError, "--set frob"),
        ({"model": DEMO, "data": "missing.jsonl"}, DataError, "missing.jsonl: there is no such file"),
        ({"base_url": "127.0.0.1:9", "model": DEMO}, DataError, "--base-url"),
        ({"base_url": "http://127.0.0.1:9", "model": DEMO, "store": "/x"}, DataError, "--store"),
        ({"model": DEMO, "actors": 100}, CollectError, "100 engines need"),
    ],
)
def test_wrong_arguments_are_refused_by_name(
    given: dict[str, Any], error: type[Exception], message: str, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.collect.remote.MAX_OUTAGE_S", 0.0)
    monkeypatch.setattr("deployments.collect.collection.URL", "http://127.0.0.1:9/v1")
    own = {} if "base_url" in given or "model" not in given else {"store": str(store)}
    with pytest.raises(error, match=message):
        collect(**own | {"data": problems(2), "session": "refused", "points": POINTS, "on_error": "skip"} | given)
