"""Small objects of a session become one, and nothing is lost or doubled by it, whatever happens on the way."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow.parquet as parquet
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.activations import compacting, load, runs
from deployments.activations.catalogue import Catalogue
from deployments.activations.compacting import Compactor
from deployments.activations.exports import export
from deployments.activations.marks import counted
from deployments.activations.objects import ObjectFile, place_of
from deployments.activations.tables import runs_table, table
from deployments.activations.taking import _Told
from deployments.activations.writer import Writer

POINT, OTHER = "layers.0.output", "layers.1.output"
HOURS = 3 * compacting.READERS_S


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(compacting, "MANY", 4)


@pytest.fixture
def catalogue() -> Catalogue:
    return Catalogue()


@pytest.fixture
def writer(bucket, catalogue) -> Iterator[Writer]:
    writer = Writer(bucket.place, catalogue)
    yield writer
    writer.close()


@pytest.fixture
def compactor(bucket, catalogue) -> Compactor:
    return Compactor(bucket.place, catalogue, threading.Lock())


@pytest.fixture
def store_apart(writer, make) -> Callable:
    """Stores runs, each in an object of its own; gives them and where they are."""

    def stored(count, session="session"):
        made = [make(f"{session}-{i:02}", {POINT: torch.randn(3, 4)}, session_id=session) for i in range(count)]
        answers = [writer.submit(one.facts, one.batches).result() for one in made]
        return {
            one.facts.run_id: (one.points[POINT], answer.points[POINT].uri.rpartition("/")[2])
            for one, answer in zip(made, answers, strict=True)
        }

    return stored


def damage(file: ObjectFile, values: torch.Tensor) -> None:
    """Change one byte of a point's values."""
    data = bytearray(file.read())
    data[data.index(values.numpy().tobytes())] ^= 1
    file.write(bytes(data))


def listed(catalogue: Catalogue, session: str = "session") -> list[str]:
    return sorted(run["run_id"] for run in catalogue.session(session)["runs"])


def there(bucket, session: str = "session") -> list[str]:
    """All objects of a session, those that count no more and marks as well."""
    return sorted(info.base_name for info in bucket.place.below(session).infos())


def assert_reads(bucket, stored) -> None:
    """Every run is there once, and every name that one ever had leads to it."""
    assert sorted(run.run_id for run in runs(bucket.uri("session"))) == sorted(stored)
    for run_id, (values, name) in stored.items():
        assert torch.equal(load(bucket.uri(f"session/{name}"), run_id, verify=True)[POINT], values)


def test_small_objects_become_one_and_every_uri_of_a_run_still_leads_to_it(bucket, compactor, catalogue, store_apart):
    stored = store_apart(6)
    small = bucket.objects()
    compactor.join()
    assert len(bucket.objects()) == 1
    compactor.tidy()
    assert set(small) < set(there(bucket))  # readers may be at the small ones
    assert_reads(bucket, stored)
    compactor.tidy(time.time() + HOURS)
    assert there(bucket) == bucket.objects()
    assert_reads(bucket, stored)
    for run_id, (values, _) in stored.items():
        entry = catalogue.find(run_id)
        again = load(bucket.uri(f"session/{entry.uri.rpartition('/')[2]}"), run_id, offset=entry.offset)
        assert torch.equal(again[POINT], values)
    assert listed(Catalogue.copied(bucket.place)) == listed(catalogue)


def test_objects_of_other_points_stay_apart_and_are_not_even_opened(bucket, writer, compactor, store_apart, make):
    store_apart(3)
    for i in range(3):
        other = make(f"other-{i}", {OTHER: torch.randn(3, 4)})
        writer.submit(other.facts, other.batches).result()
    bucket.server.requests.clear()
    compactor.join()
    assert bucket.server.requests == []
    assert len(bucket.objects()) == 6


def test_a_join_fetches_each_small_object_once(bucket, compactor, store_apart):
    names = [name for _, name in store_apart(6).values()]
    bucket.server.requests.clear()
    compactor.join()
    fetched = [path for method, path in bucket.server.requests if method == "GET"]
    assert [sum(name in path for path in fetched) for name in names] == [1] * 6


def test_while_small_objects_stand_beside_the_large_one_readers_of_the_session_find_each_run_once(
    bucket, compactor, store_apart, tmp_path
):
    stored = store_apart(5)
    compactor.join()
    assert_reads(bucket, stored)
    assert runs_table(bucket.uri("session"))["run_id"].to_pylist() == sorted(stored)
    assert len(table(bucket.uri(""), session="session")) == len(table(bucket.uri(""))) == 15
    assert len(export(bucket.uri("session"), tmp_path, "safetensors")) == 5
    [rows] = export(bucket.uri(""), tmp_path, "parquet")
    assert parquet.read_metadata(rows).num_rows == 15


def test_a_store_that_starts_meanwhile_knows_the_runs_by_the_large_one(
    bucket, compactor, store_apart, tmp_path, monkeypatch
):
    monkeypatch.setenv("VITRINE_HOME", str(tmp_path))
    stored = store_apart(5)
    compactor.join()
    found = Catalogue.rebuild(bucket.place)
    [large] = bucket.objects()
    assert [file["uri"].rpartition("/")[2] for file in found.session("session")["files"]] == [large]
    assert listed(found) == sorted(stored)
    Compactor(bucket.place, found, threading.Lock()).tidy(time.time() + HOURS)
    assert there(bucket) == [large]
    assert_reads(bucket, stored)


def test_an_upload_that_is_cut_short_loses_nothing_and_is_done_again(
    bucket, compactor, catalogue, store_apart, monkeypatch, caplog
):
    stored, small = store_apart(5), bucket.objects()
    write = ObjectFile.write

    def torn(self, data):
        write(self, data if self.name.endswith(".joined") else bytes(data)[: len(data) // 2])

    def dies(self):
        raise OSError("killed here")

    with monkeypatch.context() as patched:
        patched.setattr(ObjectFile, "write", torn)
        patched.setattr(ObjectFile, "remove", dies)
        compactor.join()
    assert "killed here" in caplog.text
    assert len(there(bucket)) == 7  # half of it, and its mark
    assert_reads(bucket, stored)
    assert listed(Catalogue.copied(bucket.place)) == sorted(stored)
    compactor.tidy(time.time() + HOURS)
    assert there(bucket) == small
    compactor.join()
    compactor.tidy(time.time() + HOURS)
    assert len(there(bucket)) == 1
    assert_reads(bucket, stored)


def test_an_upload_that_fails_leaves_nothing(bucket, compactor, store_apart, caplog):
    store_apart(5)
    before = there(bucket)
    bucket.server.fails = lambda method, path: method == "PUT" and path.endswith("-000001.arrow")
    compactor.join()
    bucket.server.fails = lambda method, path: False
    assert there(bucket) == before
    assert "stays as it is for now" in caplog.text


def test_a_store_that_dies_before_it_knows_where_runs_are_loses_and_doubles_nothing(
    bucket, compactor, store_apart, monkeypatch
):
    stored = store_apart(5)
    monkeypatch.setattr(Compactor, "_move", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        compactor.join()
    monkeypatch.undo()
    monkeypatch.setattr(compacting, "MANY", 4)
    compactor.join()  # as another writer of the same process would
    assert len(bucket.objects()) == 1
    assert_reads(bucket, stored)
    compactor.tidy(time.time() + HOURS)
    assert_reads(bucket, stored)
    assert {run["points"][POINT]["uri"].rpartition("/")[2] for run in compactor._catalogue.runs()} == {*there(bucket)}


def test_small_objects_stay_where_the_large_one_changed_since(bucket, compactor, store_apart, caplog):
    stored, small = store_apart(5), bucket.objects()
    compactor.join()
    [large] = bucket.objects()
    damage(bucket.place.below("session").file(large), stored["session-03"][0])
    compactor.tidy(time.time() + HOURS)
    assert set(small) < set(there(bucket))
    assert "is not as it was written" in caplog.text


def test_what_is_damaged_stays_as_it_is_and_keeps_no_other_from_being_joined(bucket, compactor, store_apart, caplog):
    stored = store_apart(6)
    store_apart(4, "session-b")
    file = bucket.place.below("session").file(stored["session-02"][1])
    damage(file, stored["session-02"][0])
    bucket.place.below("session").file("20260101T000000-00000000-000001.arrow").write(b"ARROW1\0\0torn")
    compactor.join()
    assert file.name in bucket.objects()
    assert len(bucket.objects()) == 3
    assert len(bucket.objects("session-b")) == 1
    assert "session-02 layers.0.output are not as they were written" in caplog.text
    bucket.server.requests.clear()
    compactor.join()
    assert bucket.server.requests == []  # and is remembered
    compactor.tidy(time.time() + HOURS)
    assert sorted(run.run_id for run in runs(bucket.uri("session"))) == sorted(stored)


def test_an_object_that_cannot_be_fetched_keeps_no_other_from_being_joined(bucket, compactor, store_apart):
    stored = store_apart(5)
    name = stored["session-02"][1]
    bucket.server.fails = lambda method, path: method == "GET" and name in path
    compactor.join()
    bucket.server.fails = lambda method, path: False
    assert name in bucket.objects()
    assert len(bucket.objects()) == 2
    assert_reads(bucket, stored)


def test_a_file_that_a_node_tells_of_again_once_it_became_part_of_another_is_forgotten_with_it(
    bucket, compactor, catalogue, store_apart, writer
):
    stored = store_apart(5)
    told, add = [], catalogue.add
    catalogue.add = lambda *args: told.append(args) or add(*args)
    store_apart(1, "session-b")
    [(_, _, other)] = [args for args in told if args[1]]
    compactor.join()
    [large] = bucket.objects()
    small = bucket.place.below("session").file(stored["session-03"][1])
    entries = [catalogue.find("session-03")._replace(uri=small.uri)]
    add("session", entries, other._replace(uri=small.uri))
    compactor.tidy(time.time() + HOURS)
    assert [file["uri"].rpartition("/")[2] for file in catalogue.session("session")["files"]] == [large]
    assert listed(catalogue) == sorted(stored)


@pytest.fixture(scope="module")
def three(make) -> Iterator[tuple[Path, dict[str, torch.Tensor]]]:
    """A store of three objects, and the runs that are in them: the second has three, one of them of several batches."""
    with tempfile.TemporaryDirectory() as folder:
        root, made = Path(folder), []
        (root / "session").mkdir()
        writer = Writer(place_of(root.as_uri()), Catalogue())
        held, entered = threading.Event(), threading.Event()
        for number in range(3):
            some = [
                make(f"{number}{name}", {POINT: torch.randn(4, 2)}, parts=2) for name in ("abc" if number == 1 else "a")
            ]
            made += some
            held.clear()
            entered.clear()
            busy = writer._behind(lambda: (entered.set(), held.wait()))  # so that they share a commit
            entered.wait()
            futures = [writer.submit(one.facts, one.batches) for one in some]
            held.set()
            busy.result()
            for future in futures:
                future.result()
        writer.close()
        assert len(list((root / "session").iterdir())) == 3
        yield root, {one.facts.run_id: one.points[POINT] for one in made}


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_whichever_byte_of_a_small_object_changes_no_run_is_lost(three, data):
    root, values = three
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        patched.setattr(compacting, "MANY", 2)
        shutil.copytree(root, folder, dirs_exist_ok=True)
        place = place_of(Path(folder).as_uri())
        catalogue = Catalogue.copied(place) if data.draw(st.booleans(), "known before") else None
        path = sorted(Path(folder, "session").iterdir())[1]
        changed = bytearray(path.read_bytes())
        changed[data.draw(st.integers(0, len(changed) - 1), "byte")] ^= 1 << data.draw(st.integers(0, 7), "bit")
        path.write_bytes(changed)
        catalogue = catalogue or Catalogue.copied(place)
        compactor = Compactor(place, catalogue, threading.Lock())
        compactor.join()
        compactor.tidy(time.time() + HOURS)
        assert len(list(Path(folder, "session").iterdir())) <= 2
        good = counted(place.below("session"))
        if path.exists():
            assert path.read_bytes() == changed
            good = [file for file in good if file.name != path.name]
            values = {run_id: tensor for run_id, tensor in values.items() if run_id[0] != "1"}
        for run_id, tensor in values.items():
            [run] = [load(file, run_id, verify=True) for file in good if run_id in [one.run_id for one in runs(file)]]
            assert torch.equal(run[POINT], tensor)


def test_many_objects_of_any_size_below_the_limit_become_large_ones(tmp_path, make, monkeypatch):
    (tmp_path / "session").mkdir()
    place, catalogue = place_of(tmp_path.as_uri()), Catalogue()
    writer = Writer(place, catalogue)
    for i in range(12):
        made = make(f"r{i:02}", {POINT: torch.randn(512, 64)})
        writer.submit(made.facts, made.batches).result()
    size = max(path.stat().st_size for path in (tmp_path / "session").iterdir())
    monkeypatch.setattr(compacting, "SMALL", size)
    monkeypatch.setattr(compacting, "LARGE", 3 * size)  # fewer than are many
    compactor = Compactor(place, catalogue, threading.Lock())
    compactor.join()
    compactor.tidy(time.time() + HOURS)
    writer.close()
    assert [run.run_id for run in runs(place.below("session").uri)] == [f"r{i:02}" for i in range(12)]
    assert len(list((tmp_path / "session").iterdir())) == 4


@pytest.fixture
def held_join(writer, compactor, monkeypatch) -> Iterator[Callable]:
    """Begins a join that waits before an object is fetched or put there; gives what lets it go on and waits for it."""
    compactor._alone = writer._keeper.alone
    entered, held = threading.Event(), threading.Event()
    joining = threading.Thread(target=compactor.join)

    def end():
        held.set()
        if joining.ident:
            joining.join()

    def begin(method, suffix):
        real = getattr(ObjectFile, method)

        def slow(self, *args):
            if threading.current_thread() is joining and self.name.endswith(suffix) and not entered.is_set():
                entered.set()
                held.wait()
            return real(self, *args)

        monkeypatch.setattr(ObjectFile, method, slow)
        joining.start()
        assert entered.wait(60)
        return end

    yield begin
    end()


@pytest.mark.parametrize("at", ["read", "write"])
def test_runs_are_stored_while_others_are_joined(writer, bucket, store_apart, held_join, make, at):
    stored = store_apart(5)
    end = held_join(at, ".arrow")
    made = make("meanwhile")
    name = writer.submit(made.facts, made.batches).result().points[POINT].uri.rpartition("/")[2]
    end()
    assert len(bucket.objects()) == 2
    assert_reads(bucket, stored | {"meanwhile": (made.points[POINT], name)})


@pytest.mark.parametrize(("at", "suffix"), [("read", ".arrow"), ("write", ".joined"), ("write", ".arrow")])
def test_a_deletion_wins_over_a_join_that_is_under_way(
    bucket, writer, catalogue, compactor, store_apart, held_join, make, at, suffix
):
    store_apart(5)
    end = held_join(at, suffix)
    deleted = writer.delete("session")
    if at == "read":
        assert deleted.result()  # does not wait for it
    end()
    assert deleted.result()
    after = make("after")
    writer.submit(after.facts, after.batches).result()
    for catalog in (catalogue, Catalogue.copied(bucket.place)):
        assert listed(catalog) == ["after"]
    assert len(there(bucket)) == 1
    compactor.tidy(time.time() + HOURS)
    assert [run.run_id for run in runs(bucket.uri("session"))] == ["after"]
    assert bucket.marks() == []


def test_a_deletion_between_a_join_and_its_move_wins_too(
    bucket, writer, catalogue, compactor, store_apart, monkeypatch
):
    store_apart(5)
    move = Catalogue.move
    monkeypatch.setattr(Catalogue, "move", lambda self, *args: writer.delete("session").result() and move(self, *args))
    compactor.join()
    assert catalogue.session("session") is None
    assert there(bucket) == []


def test_a_store_compacts_by_itself_and_counts_what_is_used_anew(bucket, store_apart, writer, make, monkeypatch):
    stored = store_apart(5)
    writer.close()
    monkeypatch.setattr(compacting, "_EVERY_S", 0.01)
    known, moved, move = Catalogue.copied(bucket.place), threading.Event(), Catalogue.move
    monkeypatch.setattr(Catalogue, "move", lambda self, *args: (move(self, *args), moved.set()))
    again = Writer(bucket.place, known)
    assert moved.wait(60)
    assert again._pool.used("session") == known.sizes()["session"]
    again.close()
    assert len(bucket.objects()) == 1
    assert_reads(bucket, stored)


def test_the_writer_of_a_node_leaves_compaction_to_the_stores(bucket):
    def compactors() -> int:
        return sum(thread.name == "activation-compactor" for thread in threading.enumerate())

    before = compactors()
    node = Writer(bucket.place, _Told(None))
    assert compactors() == before
    store = Writer(bucket.place, Catalogue())
    assert compactors() == before + 1
    store.close()
    assert compactors() == before
    node.close()
