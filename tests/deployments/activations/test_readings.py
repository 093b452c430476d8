"""A download is handed over in pieces, ends with its last byte or an error, and holds nothing when it is done."""

from __future__ import annotations

import io

import numpy
import pyarrow as pa
import pytest
import torch

from deployments.activations import readings
from deployments.activations.catalogue import Catalogue
from deployments.activations.facts import StoreError
from deployments.activations.reader import messages
from deployments.activations.readings import Readings
from deployments.activations.writer import Writer
from deployments.errors import RequestError


@pytest.fixture
def store(make, tmp_path):
    """`(writer, readings)` of a store with a session of three runs in two parts each."""
    catalogue = Catalogue()
    writer = Writer(tmp_path, catalogue)
    for run in ("r0", "r1", "r2"):
        made = make(run, {"layers.0.output": torch.randn(40, 16).bfloat16()}, parts=2)
        writer.submit(made.facts, made.batches).result()
    yield writer, Readings(catalogue, tmp_path)
    writer.close()


def taken(found: Readings, key: str) -> bytes:
    body = io.BytesIO()
    while piece := found.more(key):
        assert len(piece) <= readings.PIECE
        body.write(piece)
    return body.getvalue()


@pytest.mark.parametrize("piece", [1, 7, 1000, 1 << 20])
@pytest.mark.parametrize("format", ["arrow", "safetensors", "npz", "pt"])
def test_pieces_of_any_size_join_to_the_length_that_was_said(store, monkeypatch, piece, format):
    _, found = store
    whole = taken(found, found.begin("session", None, None, format).key)
    monkeypatch.setattr(readings, "PIECE", piece)
    begun = found.begin("session", None, None, format)
    assert taken(found, begun.key) == whole
    assert len(whole) == begun.length


@pytest.mark.parametrize("names", [["r0"], ["r2"], ["r2", "r0"], ["r1", "r1"], ["r9", "r1"], ["r0", "r1", "r2", "r9"]])
def test_named_runs_are_those_of_the_whole_session(store, make, names):
    writer, found = store
    other = make("r9", {"layers.1.output": torch.randn(3, 4)})  # in a file of its own
    writer.submit(other.facts, other.batches).result()
    archive = numpy.load(io.BytesIO(taken(found, found.begin("session", names, None, "npz").key)))
    whole = numpy.load(io.BytesIO(taken(found, found.begin("session", None, None, "npz").key)))
    one = len(names) == 1
    wanted = {name.removeprefix(f"{names[0]}/") if one else name for name in whole if name.split("/")[0] in names}
    assert set(archive) == wanted
    for name in wanted:
        assert numpy.array_equal(archive[name], whole[f"{names[0]}/{name}" if one else name])
    rows = pa.ipc.open_stream(taken(found, found.begin("session", names[:1], None, "arrow").key)).read_all()
    assert rows["run_id"].unique().to_pylist() == names[:1]


def test_a_named_run_is_read_at_its_place(store, tmp_path):
    _, found = store
    wanted = taken(found, found.begin("session", ["r2"], None, "npz").key)
    (file,) = (tmp_path / "session").iterdir()
    first = next(iter(messages(file))).end
    with file.open("r+b") as bytes_before:
        bytes_before.seek(first)
        bytes_before.write(bytes(64))  # the head of a batch of r0: nothing behind it would be found by looking through
    assert taken(found, found.begin("session", ["r2"], None, "npz").key) == wanted


def test_a_run_that_is_none_is_refused_with_some_that_are(store):
    _, found = store
    with pytest.raises(RequestError, match="there is no run 'r8'; there is r0, r1, r2"):
        found.begin("session", ["r1", "r8"], None, "npz")
    with pytest.raises(RequestError, match="no such run recorded 'layers.7.output'; there is layers.0.output"):
        found.begin("session", ["r1"], ["layers.7.output"], "npz")
    assert found.begin("no-session", ["r1"], None, "npz") is None


def test_a_run_that_comes_while_a_download_goes_on_is_not_in_it(store, make):
    writer, found = store
    begun = found.begin("session", None, None, "arrow")
    made = make("late", {"layers.0.output": torch.randn(4, 16).bfloat16()})
    writer.submit(made.facts, made.batches).result()
    table = pa.ipc.open_stream(taken(found, begun.key)).read_all()
    assert table["run_id"].unique().to_pylist() == ["r0", "r1", "r2"]


def test_a_deletion_ends_a_download_also_where_the_session_comes_again(store, make, monkeypatch):
    writer, found = store
    monkeypatch.setattr(readings, "PIECE", 100)
    begun = found.begin("session", None, None, "npz")
    assert found.more(begun.key)
    assert writer.delete("session").result()
    made = make("new")
    writer.submit(made.facts, made.batches).result()
    with pytest.raises(StoreError, match="deleted while it was read"):
        found.more(begun.key)
    assert found.begin("gone", None, None, "arrow") is None


def test_a_file_that_shrinks_ends_a_download_with_an_error(store, tmp_path):
    _, found = store
    begun = found.begin("session", None, None, "arrow")
    (path,) = (tmp_path / "session").glob("*.arrow")
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(StoreError, match="too early"):
        taken(found, begun.key)


def test_downloads_are_so_many_at_once_and_idle_ones_are_given_up(store, monkeypatch):
    _, found = store
    begun = [found.begin("session", None, None, "arrow") for _ in range(readings.MOST)]
    with pytest.raises(RequestError) as refused:
        found.begin("session", None, None, "arrow")
    assert (refused.value.status, refused.value.code) == (429, "server_busy")
    found.end(begun[0].key)
    again = found.begin("session", None, None, "arrow")
    monkeypatch.setattr(readings, "IDLE_S", 0)
    found.begin("session", None, None, "arrow")
    with pytest.raises(StoreError, match="begin the download again"):
        found.more(again.key)
    found.end(again.key)
