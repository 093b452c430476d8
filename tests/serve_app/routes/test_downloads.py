"""Recorded runs are downloaded bit for bit, in every format, completely or with an error."""

from __future__ import annotations

import io
import json
import os

import httpx
import numpy as np
import pyarrow as pa
import pytest
import ray
import safetensors.torch
import torch

from deployments.activations import load
from deployments.activations.__main__ import main
from deployments.activations.actors.store import connect
from deployments.activations.facts import RunFacts, SegmentFacts
from deployments.activations.reader import sources
from deployments.activations.segments.columns import to_batch, to_tensor
from deployments.activations.segments.schema import point_types
from deployments.points.patterns import Patterns
from serve_app.http.ranges import PAGE_BYTES

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
        segment = SegmentFacts(session, "m", None, "Qwen3ForCausalLM", {}, {name: name for name in points})
        given = {"run_id": run, "sample_id": None, "positions": range(rows), "token_ids": range(rows)}
        batch = to_batch(segment, **given, prompt_tokens=1, points=points)
        facts = RunFacts(run, session, "m", created=1.0, prompt_tokens=1, tokens=rows, tags={"k": run})
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
def download(served):
    def get(session: str, *, method: str = "GET", headers=None, **params) -> httpx.Response:
        url = f"{served.base_url}/activations/session/{session}/data"
        return httpx.request(method, url, params=params, headers=headers, timeout=60)

    return get


def streams(body: bytes) -> list[tuple[pa.RecordBatch, dict[bytes, bytes]]]:
    """All batches of streams one behind the other, each with its own metadata."""
    file, found = io.BytesIO(body), []
    while file.tell() < len(body):
        stream = pa.ipc.open_stream(file)
        found += [(item.batch, item.custom_metadata) for item in stream.iter_batches_with_custom_metadata()]
    return found


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def test_an_arrow_download_is_what_the_files_hold(download, runs):
    answer = download("mixed")
    assert answer.headers["content-type"] == "application/vnd.apache.arrow.stream"
    assert int(answer.headers["content-length"]) == len(answer.content)
    seen = set()
    for batch, metadata in streams(answer.content):
        run = json.loads(metadata[b"run"])
        assert run["tags"] == {"k": run["run_id"]}
        assert batch["run_id"].unique().to_pylist() == [run["run_id"]]
        for name, kind in point_types(batch.schema).items():
            kept = runs[run["run_id"]][name]
            if isinstance(kept, torch.Tensor):
                assert same_bits(to_tensor(batch[name], kind.dtype), kept)
            seen.add((run["run_id"], name))
    assert seen == {(run, name) for run, points in runs.items() for name in points}


def test_what_a_request_recorded_reads_in_two_lines(served, download):
    body = {"model": "vitrine-demo", "prompt": "Tom has 3.", "max_tokens": 3, "session_id": "two-lines"}
    body |= {"capture": {"points": ["layers.1.output"]}}
    run = httpx.post(f"{served.base_url}/completions", json=body, timeout=60).json()["activations_meta"]["runs"][0]
    table = pa.ipc.open_stream(download("two-lines").content).read_all()
    rows = table["layers.1.output"].combine_chunks().to_numpy_ndarray()
    kept = load(run["points"]["layers.1.output"]["uri"], run["run_id"])["layers.1.output"]
    assert np.array_equal(rows, kept.numpy())


READ = {
    "safetensors": safetensors.torch.load,
    "pt": lambda body: {name: rows for name, rows in torch.load(io.BytesIO(body)).items() if name[-5:] != "facts"},
    "npz": lambda body: {
        name: torch.from_numpy(rows) for name, rows in np.load(io.BytesIO(body)).items() if rows.dtype.kind != "U"
    },
}


@pytest.mark.parametrize("format", READ)
@pytest.mark.parametrize("chosen", [None, ["one", "two"], ["one"]])
def test_a_file_of_tensors_names_those_of_several_runs_by_their_run(download, runs, format, chosen):
    answer = download("mixed", format=format, **({"run": chosen} if chosen else {}))
    assert int(answer.headers["content-length"]) == len(answer.content)
    found = READ[format](answer.content)
    for run in chosen or runs:
        prefix = "" if chosen == ["one"] else f"{run}/"
        for name, kept in runs[run].items():
            rows = found.pop(prefix + name)
            rows = rows[0] if format == "pt" else rows
            if isinstance(kept, Patterns):
                lengths = found.pop(f"{prefix}{name}.lengths").reshape(-1)
                assert lengths.tolist() == [1, 2, 3, 4]
                kept = kept.padded()
            assert same_bits(rows, kept.float() if format == "npz" else kept)
        for name in ("position", "token_id"):
            assert found.pop(prefix + name).reshape(-1).tolist() == list(range(len(rows)))
    assert not found


@pytest.mark.parametrize("params", [{"run": "one,three"}, {"run": ["one", "three"]}])
def test_runs_are_repeated_or_apart_by_commas(download, runs, params):
    assert {batch["run_id"][0].as_py() for batch, _ in streams(download("mixed", **params).content)} == {"one", "three"}


def test_of_the_points_come_those_that_are_named_and_of_the_runs_those_that_have_them(download, runs):
    found = streams(download("mixed", points=f"{OTHER},{POINT}").content)
    assert {name for batch, _ in found for name in point_types(batch.schema)} == {OTHER, POINT}
    assert {batch["run_id"][0].as_py() for batch, _ in streams(download("mixed", points=OTHER).content)} == {"three"}


@pytest.mark.parametrize(
    ("session", "params", "status", "param", "code"),
    [
        ("never-was", {}, 404, "session_id", "session_not_found"),
        (".bad", {}, 400, "session_id", "invalid_value"),
        ("mixed", {"run": "nobody"}, 404, "run", "run_not_found"),
        ("mixed", {"run": "one,nobody"}, 404, "run", "run_not_found"),
        ("mixed", {"points": "nothing"}, 400, "points", "point_not_recorded"),
        ("mixed", {"run": "three", "points": POINT}, 400, "points", "point_not_recorded"),
        ("mixed", {"run": ""}, 400, "run", "invalid_value"),
        ("mixed", {"points": f"{POINT},"}, 400, "points", "invalid_value"),
        ("mixed", {"format": "csv"}, 400, "format", "invalid_value"),
    ],
)
def test_what_is_not_there_is_refused_by_its_field(download, runs, session, params, status, param, code):
    answer = download(session, **params)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (status, param, code)


@pytest.fixture
def large(served, put):
    for i in range(MUCH):
        put("large", f"r{i}", {POINT: torch.full((1024, 2048), float(i))})
    yield "large"
    httpx.delete(f"{served.base_url}/activations/session/large", timeout=60)


@pytest.mark.parametrize("format", ["arrow", *READ])
def test_a_large_session_comes_in_pages_of_one_file(served, download, large, format):
    head = download(large, method="HEAD", format=format)
    length, tag = int(head.headers["content-length"]), head.headers["etag"]
    refused = download(large, format=format)
    assert (refused.status_code, refused.json()["error"]["code"]) == (413, "range_required")
    assert str(length) in refused.json()["error"]["message"]
    assert refused.headers["etag"] == tag
    body = bytearray()
    while len(body) < length:
        page = download(large, format=format, headers={"Range": f"bytes={len(body)}-", "If-Match": tag})
        assert page.status_code == 206
        assert len(page.content) == min(PAGE_BYTES, length - len(body))
        body += page.content
    if format == "arrow":
        table = pa.ipc.open_stream(bytes(body)).read_all()
        assert table["run_id"].unique().to_pylist() == [f"r{i}" for i in range(MUCH)]
    else:
        assert all(torch.all(READ[format](bytes(body))[f"r{i}/{POINT}"] == float(i)) for i in range(MUCH))


@pytest.mark.parametrize("format", ["arrow", "npz"])
def test_a_link_downloads_a_large_session_once(served, download, large, format):
    made = download(large, method="POST", format=format).json()
    answer = httpx.get(served.root + made["path"], timeout=60)
    assert answer.status_code == 200
    assert len(answer.content) == made["bytes"] > 2 * PAGE_BYTES
    assert answer.headers["content-disposition"].startswith("attachment; filename=")
    if format == "npz":
        assert (np.load(io.BytesIO(answer.content))[f"r1/{POINT}"] == 1).all()
    assert httpx.get(served.root + made["path"], timeout=60).status_code == 404


def test_a_download_goes_on_while_its_session_grows_and_ends_where_it_goes(served, download, large, put):
    begun = download(large, headers={"Range": "bytes=0-9"})
    put(large, "late", {POINT: torch.ones(1, 2048)})
    asked = {"Range": "bytes=10-19", "If-Match": begun.headers["etag"]}
    again = download(large, headers=asked)
    assert (again.status_code, again.headers["etag"]) == (206, begun.headers["etag"])
    assert again.headers["content-range"].rpartition("/")[2] == begun.headers["content-range"].rpartition("/")[2]
    other = download(large, headers=asked | {"If-Match": '"none-3"'})
    assert (other.status_code, other.json()["error"]["code"]) == (412, "download_changed")
    assert httpx.delete(f"{served.base_url}/activations/session/{large}", timeout=60).status_code == 200
    assert download(large, headers=asked).status_code == 404


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
        pulled = load(tmp_path / "mixed", run)
        assert pulled.facts.tags == {"k": run}
        for name, kept in points.items():
            left, right = (rows.values if isinstance(rows, Patterns) else rows for rows in (pulled[name], kept))
            assert same_bits(left, right)
    assert main(["pull", served.base_url, "never-was", "--dir", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "deployments.activations: 404: there is no session 'never-was'\n"


def test_each_way_in_which_a_stored_run_cannot_be_read_has_an_error_of_its_own(served, put, download):
    for session in ("cut", "gone"):
        put(session, f"run-{session}", {POINT: torch.randn(600, 32)})
    [cut], [gone] = ([*(served.home / "activations" / session).glob("*.arrow")] for session in ("cut", "gone"))

    def patched(run: str) -> httpx.Response:
        spec = {"op": "replace", "point": POINT, "tokens": "prompt_last", "from": {"run_id": run, "tokens": "last"}}
        body = {"model": "vitrine-demo", "prompt": "Ann", "max_tokens": 1, "interventions": [spec]}
        return httpx.post(f"{served.base_url}/completions", json=body, timeout=60)

    def said(answer: httpx.Response) -> tuple[int, str, str | None]:
        error = answer.json()["error"]
        return answer.status_code, error["code"], error["param"]

    tag = download("gone", headers={"Range": "bytes=0-9"}).headers["etag"]
    os.truncate(cut, 4000)
    gone.unlink()
    assert said(download("none")) == (404, "session_not_found", "session_id")
    assert said(download("gone", run="run-none")) == (404, "run_not_found", "run")
    assert said(patched("run-none")) == (400, "run_not_found", "interventions[0].from.run_id")
    asked = ((download("cut"), None), (download("cut", run="run-cut", format="npz"), None))
    for answer, field in (*asked, (patched("run-cut"), "interventions[0].from.run_id")):
        assert said(answer) == (500, "store_failed", field)
        assert str(cut) in answer.json()["error"]["message"]
    begun = download("gone", headers={"Range": "bytes=0-99999", "If-Match": tag})
    for answer in (download("gone"), begun):
        assert said(answer) == (410, "file_gone", None)
        assert str(gone) in answer.json()["error"]["message"]
    assert said(patched("run-gone")) == (410, "file_gone", "interventions[0].from.run_id")
    for session in ("cut", "gone"):
        url = f"{served.base_url}/activations/session/{session}"
        assert httpx.get(url, timeout=60).json()["runs"][0]["run_id"] == f"run-{session}"
        assert httpx.delete(url, timeout=60).status_code == 200
        assert said(httpx.get(url, timeout=60)) == (404, "session_not_found", "session_id")


def test_a_run_is_loaded_from_a_server_by_its_id_alone(served, put, monkeypatch):
    points = {POINT: torch.randn(5, 8).bfloat16()}
    put("elsewhere", "run-elsewhere", points)
    monkeypatch.setenv("VITRINE_ACTIVATIONS", served.root)
    assert same_bits(load("run-elsewhere")[POINT], points[POINT])
    with pytest.raises(FileNotFoundError, match="has no run 'run-none'"):
        load("run-none")


def test_files_of_runs_that_are_loaded_from_a_server_do_not_pile_up(served, put):
    points = [torch.full((5, 8), float(i)) for i in range(20)]
    for i, values in enumerate(points):
        put("many", f"many-{i}", {POINT: values})
    found = [load(f"many-{i}", root=served.root)[POINT] for i in range(20)]
    assert len(list(sources._temporary().iterdir())) <= 16
    assert all(torch.equal(one, values) for one, values in zip(found, points, strict=True))
