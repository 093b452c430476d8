"""Recorded runs are fetched bit for bit, as bytes of their files."""

from __future__ import annotations

import http.client
import json
import os
from urllib.parse import urlsplit
from urllib.request import urlopen

import httpx
import pyarrow as pa
import pytest
import ray
import torch

from deployments.activations import read_run
from deployments.activations.__main__ import main
from deployments.activations.actors.store import connect
from deployments.activations.facts import FileInfo, RunInfo
from deployments.activations.segments.columns import to_batch, to_tensor
from deployments.activations.segments.schema import point_types
from deployments.points.patterns import Patterns
from serve_app.http.paging import PAGE_BYTES
from vitrine.runs.files import head_length, stream_of

POINT, WEIGHTS, OTHER = "layers.1.output", "layers.1.attention.weights", "norm.output"
MUCH = 3  # runs of 8 MiB


@pytest.fixture(scope="module")
def store(served):
    return connect(str(served.home / "activations"))


@pytest.fixture(scope="module")
def put(store):
    """`put(session, run, points)`: stores a run as a replica does."""

    def stored(session: str, run: str, points) -> None:
        rows = len(next(iter(points.values())))
        segment = FileInfo(session, "m", None, "Qwen3ForCausalLM", {}, {name: name for name in points})
        given = {"run_id": run, "sample_id": None, "positions": range(rows), "token_ids": range(rows)}
        batch = to_batch(segment, **given, prompt_tokens=1, points=points)
        facts = RunInfo(run, session, "m", created=1.0, prompt_tokens=1, tokens=rows, tags={"k": run})
        ray.get(store.write.remote(facts, [ray.put(batch)]))

    return stored


@pytest.fixture(scope="module")
def runs(put):
    """What the session `mixed` holds: two runs of two points, the first a bfloat16, and one of another point."""
    kept = {}
    for run in ("one", "two"):
        patterns = Patterns(torch.randn(2 * 10).bfloat16(), 2, range(4))
        kept[run] = {POINT: torch.randn(4, 8).bfloat16(), WEIGHTS: patterns}
        kept[run][POINT][0, 0] = torch.nan  # bits are bits
    kept["three"] = {OTHER: torch.randn(2, 3)}
    for run, points in kept.items():
        put("mixed", run, points)
    return kept


@pytest.fixture(scope="module")
def fetch(served):
    """`fetch(session, file, first, end)`: bytes of a file; without `first`, as a client without ranges asks."""

    def get(session: str, file: str, first: int | None = None, end: int = 0, method: str = "GET") -> httpx.Response:
        url = f"{served.base_url}/activations/session/{session}/files/{file}"
        headers = {} if first is None else {"Range": f"bytes={first}-{end - 1}"}
        return httpx.request(method, url, headers=headers, timeout=60)

    return get


@pytest.fixture(scope="module")
def shown(served):
    return lambda session: httpx.get(f"{served.base_url}/activations/session/{session}", timeout=60).json()


def said(answer: httpx.Response) -> tuple[int, str, str | None]:
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["param"]


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def test_each_run_is_its_bytes_behind_its_files_head(shown, fetch, runs):
    for run in shown("mixed")["runs"]:
        beginning = fetch("mixed", run["file"], 0, 1 << 16).content
        own = fetch("mixed", run["file"], run["offset"], run["offset"] + run["bytes"])
        assert own.headers["content-type"] == "application/vnd.apache.arrow.file"
        assert (own.status_code, len(own.content)) == (206, run["bytes"])
        stream = stream_of(beginning[: head_length(beginning)], own.content)
        batches = [item.batch for item in pa.ipc.open_stream(stream).iter_batches_with_custom_metadata()]
        table = pa.Table.from_batches(batches)
        assert table["run_id"].unique().to_pylist() == [run["run_id"]]
        kept = runs[run["run_id"]]
        assert set(run["points"]) == set(kept)
        for name, kind in point_types(table.schema).items():
            if isinstance(kept[name], torch.Tensor):
                assert same_bits(to_tensor(table[name].combine_chunks(), kind.dtype), kept[name])


def test_a_file_without_a_range_is_sent_if_it_is_small(served, shown, fetch, runs):
    for file in shown("mixed")["files"]:
        answer = fetch("mixed", file["name"])
        assert (answer.status_code, len(answer.content)) == (200, file["bytes"])
        assert answer.content == urlopen(file["uri"]).read()[: file["bytes"]]
        head = fetch("mixed", file["name"], method="HEAD")
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-length"] == str(file["bytes"])


def test_a_large_file_comes_by_ranges(served, put, shown, fetch):
    for i in range(MUCH):
        put("large", f"r{i}", {POINT: torch.full((1024, 2048), float(i))})
    [file] = shown("large")["files"]
    length = file["bytes"]
    refused = fetch("large", file["name"])
    assert said(refused) == (413, "range_required", "Range")
    assert str(length) in refused.json()["error"]["message"]
    body = bytearray()
    while len(body) < length:
        page = fetch("large", file["name"], len(body), 1 << 40)
        assert (page.status_code, len(page.content)) == (206, min(PAGE_BYTES, length - len(body)))
        assert page.headers["content-range"] == f"bytes {len(body)}-{len(body) + len(page.content) - 1}/{length}"
        body += page.content
    assert bytes(body) == urlopen(file["uri"]).read()[:length]
    beyond = fetch("large", file["name"], length, length + 1)
    assert said(beyond) == (416, "range_not_satisfiable", "Range")
    assert beyond.headers["content-range"] == f"bytes */{length}"
    assert httpx.delete(f"{served.base_url}/activations/session/large", timeout=60).json()["deleted"]
    assert said(fetch("large", file["name"], 0, 10)) == (404, "file_not_found", "name")


def test_bytes_of_a_run_stay_where_they_are_while_its_session_grows(put, shown, fetch):
    put("grows", "first", {POINT: torch.ones(3, 8)})
    [run] = shown("grows")["runs"]
    before = fetch("grows", run["file"], 0, run["bytes"]).content
    put("grows", "second", {POINT: torch.zeros(3, 8)})
    assert fetch("grows", run["file"], 0, run["bytes"]).content == before
    first, second = shown("grows")["runs"]
    assert (first["file"], first["offset"] + first["bytes"]) == (second["file"], second["offset"])


@pytest.mark.parametrize(
    ("session", "name", "error"),
    [
        ("never-was", "x.arrow", (404, "file_not_found", "name")),
        (".bad", "x.arrow", (400, "invalid_value", "session_id")),
        ("mixed", "x.arrow", (404, "file_not_found", "name")),
        ("mixed", ".pinned", (404, "file_not_found", "name")),
        ("mixed", "..%2f..%2f.limits.json", (404, "not_found", None)),
        ("mixed", "%2e%2e", (404, "file_not_found", "name")),
    ],
)
def test_what_is_no_file_is_refused(served, fetch, runs, session, name, error):
    connection = http.client.HTTPConnection(urlsplit(served.root).netloc, timeout=60)
    connection.request("GET", f"/v1/activations/session/{session}/files/{name}")  # no client tidies the path
    answer = connection.getresponse()
    told = json.loads(answer.read())["error"]
    connection.close()
    assert (answer.status, told["code"], told["param"]) == error


def test_a_session_lists_a_hundred_runs_unless_more_are_asked_for(served, put):
    for i in range(102):
        put("hundred", f"many-{i:03}", {POINT: torch.ones(1, 4)})
    url = f"{served.base_url}/activations/session/hundred"
    first = httpx.get(url, timeout=60).json()
    assert (len(first["runs"]), first["has_more"]) == (100, True)
    rest = httpx.get(url, params={"after": first["runs"][-1]["run_id"]}, timeout=60).json()
    assert ([run["run_id"] for run in rest["runs"]], rest["has_more"]) == (["many-100", "many-101"], False)


def test_a_session_is_pulled_to_a_directory_that_load_reads(served, runs, tmp_path, capsys):
    assert main(["pull", served.root, "mixed", "--dir", str(tmp_path)]) == 0
    for run, points in runs.items():
        pulled = read_run(tmp_path / "_" / "mixed", run)
        assert pulled.facts.tags == {"k": run}
        for name, kept in points.items():
            left, right = (rows.values if isinstance(rows, Patterns) else rows for rows in (pulled[name], kept))
            assert same_bits(left, right)
    assert main(["pull", served.base_url, "never-was", "--dir", str(tmp_path)]) == 1
    assert "there is no session 'never-was'" in capsys.readouterr().err


def test_each_way_in_which_a_stored_run_cannot_be_read_has_an_error_of_its_own(served, put, shown, fetch):
    for session in ("cut", "gone"):
        put(session, f"run-{session}", {POINT: torch.randn(600, 32)})
    [cut], [gone] = ([*(served.home / "activations" / "_" / session).glob("*.arrow")] for session in ("cut", "gone"))

    def patched(run: str) -> httpx.Response:
        spec = {"op": "replace", "point": POINT, "tokens": "prompt_last", "from": {"run_id": run, "tokens": "last"}}
        body = {"model": "vitrine-demo", "prompt": "Ann", "max_tokens": 1, "interventions": [spec]}
        return httpx.post(f"{served.base_url}/completions", json=body, timeout=60)

    os.truncate(cut, 4000)
    gone.unlink()
    assert said(patched("run-none")) == (400, "run_not_found", "interventions[0].from.run_id")
    answer = patched("run-cut")
    assert said(answer) == (500, "store_failed", "interventions[0].from.run_id")
    assert "verify" in answer.json()["error"]["message"]
    assert str(served.home) not in answer.text
    answer = fetch("gone", gone.name, 0, 10)
    assert said(answer) == (410, "file_gone", None)
    assert gone.name in answer.json()["error"]["message"]
    assert str(served.home) not in answer.text
    assert said(patched("run-gone")) == (410, "file_gone", "interventions[0].from.run_id")
    for session in ("cut", "gone"):
        url = f"{served.base_url}/activations/session/{session}"
        assert httpx.delete(url, timeout=60).status_code == 200
        assert said(httpx.get(url, timeout=60)) == (404, "session_not_found", "session_id")
