"""Any byte range of a download can be requested. All ranges are of the same file, or the request is rejected."""

from __future__ import annotations

import io
import zipfile
from types import SimpleNamespace

import numpy
import pyarrow as pa
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deployments.activations import filters as downloads
from deployments.activations.catalogue.catalogue import Catalogue
from deployments.activations.export import downloads as readings
from deployments.activations.export.arrow_streams import as_arrow
from deployments.activations.export.downloads import Readings
from deployments.activations.export.tensor_files import WRITERS, tensors
from deployments.activations.facts import StoreError
from deployments.activations.filters import Choice
from deployments.activations.reader.selection import Wanted, select
from deployments.activations.reader.sources import segments
from deployments.activations.segments.batches import batches_of
from deployments.activations.writer.writer import Writer
from deployments.errors import RequestError
from deployments.points.patterns import Patterns

FORMATS = ["arrow", *WRITERS]


@pytest.fixture
def store(make, tmp_path):
    """`(writer, readings)` of a store with a session of three runs in two parts each."""
    catalogue = Catalogue()
    writer = Writer(tmp_path, catalogue)
    for run in ("r0", "r1", "r2"):
        made = make(run, {"layers.0.output": torch.randn(40, 16).bfloat16()}, parts=2)
        writer.submit(made.facts, made.batches).result()
    yield writer, Readings(catalogue)
    writer.close()


def put(writer: Writer, made) -> None:
    writer.submit(made.facts, made.batches).result()


def taken(found: Readings, choice: Choice, page: int = 1 << 20) -> bytes:
    tag, length = found.find(choice)
    return b"".join(found.page(choice, tag, first, min(first + page, length)) for first in range(0, length, page))


@pytest.fixture(scope="module")
def mixed(make, tmp_path_factory):
    """`(directory, readings)` of a session of runs of two tables, of several batches, with patterns and bfloat16."""
    root = tmp_path_factory.mktemp("mixed")
    catalogue = Catalogue()
    writer = Writer(root, catalogue)
    for run in ("r0", "r1"):
        patterns = Patterns(torch.randn(3 * 19 * 20 // 2).bfloat16(), 3, range(19))
        put(writer, make(run, {"layers.0.attention.weights": patterns, "norm.output": torch.randn(19, 5).bfloat16()}))
    for run in ("r2", "r3"):
        put(writer, make(run, {"layers.0.output": torch.randn(40, 16), "norm.output": torch.randn(40, 3)}, parts=3))
    yield root, Readings(catalogue)
    writer.close()


@pytest.mark.parametrize("format", FORMATS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_pages_of_any_sizes_in_any_order_join_to_the_whole_file(mixed, format, data):
    root, found = mixed
    files = segments(root, "session")
    if format == "arrow":
        whole = b"".join(as_arrow(files, Wanted()).read())
    else:
        WRITERS[format](tensors(select(files, Wanted()), prefixed=True), file := io.BytesIO())
        whole = file.getvalue()
    choice = Choice("session", None, None, format)
    if data.draw(st.booleans(), "planned anew"):
        found = Readings(found._catalogue)
    tag, length = found.find(choice)
    assert length == len(whole)
    cuts = sorted({0, length, *data.draw(st.lists(st.integers(0, length), max_size=12), "cuts")})
    spans = data.draw(st.permutations(list(zip(cuts, cuts[1:], strict=False))), "order")
    pages = {first: found.page(choice, tag, first, end) for first, end in spans}
    assert b"".join(pages[first] for first in sorted(pages)) == whole


@pytest.mark.parametrize("format", ["npz", "pt"])
def test_an_archive_of_pages_has_true_checksums(mixed, format):
    _, found = mixed
    assert zipfile.ZipFile(io.BytesIO(taken(found, Choice("session", None, None, format), 1000))).testzip() is None


def test_a_page_reads_no_other_run(mixed, monkeypatch):
    _, found = mixed
    choice = Choice("session")
    tag, length = found.find(choice)
    read = []
    monkeypatch.setattr(
        "deployments.activations.export.arrow_streams.select",
        lambda files, wanted: read.append(wanted) or select(files, wanted),
    )
    found.page(choice, tag, 3000, 3001)
    assert [len(wanted.runs) for wanted in read] == [1]


@pytest.mark.parametrize("names", [["r0"], ["r2"], ["r2", "r0"], ["r1", "r1"], ["r9", "r1"], ["r0", "r1", "r2", "r9"]])
def test_named_runs_are_those_of_the_whole_session(store, make, names):
    writer, found = store
    put(writer, make("r9", {"layers.1.output": torch.randn(3, 4)}))  # in a file of its own
    archive = numpy.load(io.BytesIO(taken(found, Choice("session", tuple(names), None, "npz"))))
    whole = numpy.load(io.BytesIO(taken(found, Choice("session", None, None, "npz"))))
    one = len(names) == 1
    wanted = {name.removeprefix(f"{names[0]}/") if one else name for name in whole if name.split("/")[0] in names}
    assert set(archive) == wanted
    for name in wanted:
        assert numpy.array_equal(archive[name], whole[f"{names[0]}/{name}" if one else name])
    rows = pa.ipc.open_stream(taken(found, Choice("session", (names[0],)))).read_all()
    assert rows["run_id"].unique().to_pylist() == names[:1]


def test_a_named_run_is_read_at_its_place(store, tmp_path):
    _, found = store
    wanted = taken(found, Choice("session", ("r2",), None, "npz"))
    (file,) = (tmp_path / "session").iterdir()
    first = next(iter(batches_of(file))).end
    with file.open("r+b") as bytes_before:
        bytes_before.seek(first)
        bytes_before.write(bytes(64))  # the head of a batch of r0: nothing behind it would be found by looking through
    assert taken(Readings(found._catalogue), Choice("session", ("r2",), None, "npz")) == wanted


def test_a_run_that_is_none_is_refused_with_some_that_are(store):
    _, found = store
    with pytest.raises(RequestError, match="there is no run 'r8'; there is r0, r1, r2"):
        found.find(Choice("session", ("r1", "r8"), None, "npz"))
    with pytest.raises(RequestError, match="no such run recorded 'layers.7.output'; there is layers.0.output"):
        found.find(Choice("session", ("r1",), ("layers.7.output",), "npz"))
    assert found.find(Choice("no-session", ("r1",), None, "npz")) is None


@pytest.mark.parametrize("format", FORMATS)
def test_a_run_that_comes_between_two_pages_is_left_out_and_in_the_next_download(store, make, format):
    writer, found = store
    everything, named = Choice("session", None, None, format), Choice("session", ("r0", "r2"), None, format)
    whole, of_named = taken(found, everything), taken(found, named)
    (tag, length), (tag_of_named, _) = found.find(everything), found.find(named)
    put(writer, make("late", {"layers.0.output": torch.randn(4, 16).bfloat16()}))
    for reading in (found, Readings(found._catalogue)):  # another knows nothing of the first pages
        assert reading.find(everything, tag) == (tag, length)
        assert reading.page(everything, tag, 0, length) == whole
        assert reading.page(named, tag_of_named, 0, len(of_named)) == of_named
    assert found.find(everything) != (tag, length)
    assert len(taken(found, everything)) > length


def test_pages_of_a_session_that_stays_ask_the_catalogue_once(store, monkeypatch):
    _, found = store
    choice = Choice("session")
    tag, length = found.find(choice)
    asked: list[str] = []
    monkeypatch.setattr(found._catalogue, "places", lambda *args: asked.append("places"))
    monkeypatch.setattr(found._catalogue, "entries", lambda *args: asked.append("entries"))
    for first in range(0, length, 1000):
        assert found.find(choice, tag) == (tag, length)
        assert found.page(choice, tag, first, min(first + 1000, length))
    assert asked == []


@pytest.mark.parametrize("again", [False, True])
def test_a_deletion_refuses_the_next_page_also_where_the_session_comes_again(store, make, again):
    writer, found = store
    choice = Choice("session", ("r0",), None, "npz")
    tag, _ = found.find(choice)
    assert writer.delete("session").result()
    if again:
        put(writer, make("r0", {"layers.0.output": torch.randn(40, 16).bfloat16()}, parts=2))
    with pytest.raises(RequestError, match="begin again"):
        found.page(choice, tag, 0, 100)
    assert (found.find(choice) is None) is not again


def test_a_file_that_shrinks_is_an_error(store, tmp_path):
    _, found = store
    choice = Choice("session")
    tag, length = found.find(choice)
    (path,) = (tmp_path / "session").glob("*.arrow")
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(StoreError, match="changed"):
        found.page(choice, tag, length - 100, length)


def test_a_copy_that_the_disk_has_not_room_for_is_refused(store, monkeypatch):
    _, found = store
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=4 * 3 * 40 * (16 * 2 + 8) - 1))
    with pytest.raises(RequestError, match="take arrow") as refused:
        found.find(Choice("session", None, None, "npz"))
    assert refused.value.status == 413
    assert found.find(Choice("session"))


def test_choices_that_differ_have_tags_that_do(store):
    _, found = store
    choices = [
        Choice("session", runs, points, format)
        for runs in (None, ("r0",), ("r1",))
        for points in (None, ("layers.0.output",))
        for format in FORMATS
    ]
    assert len({found.find(choice).tag for choice in choices}) == len(choices)


def test_plans_are_dropped_when_idle_and_when_there_are_too_many_and_nobody_notices(store, monkeypatch):
    _, found = store
    choice = Choice("session", ("r1",), None, "safetensors")
    tag, length = found.find(choice)
    monkeypatch.setattr(readings, "MOST_PLANS", 2)
    for run in ("r0", "r2"):
        found.find(Choice("session", (run,)))
    assert choice not in found._plans
    assert len(found._plans) == 2
    assert len(found.page(choice, tag, 0, length)) == length
    monkeypatch.setattr(readings, "MOST_PARTS", 1)
    found.find(choice)
    assert list(found._plans) == [(choice, 1)]  # the one in use
    monkeypatch.setattr(readings, "IDLE_S", 0)
    found.sweep()
    assert not found._plans
    assert downloads.IDLE_S
