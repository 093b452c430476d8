"""The index lists what the files contain, by every filter, whatever happens to its database."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sqlite3
import tempfile
from collections import Counter
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.activations import runs
from deployments.activations.actors.reader import ActivationReader
from deployments.activations.facts import SessionName
from deployments.activations.filters import EVERYTHING, Filter
from deployments.activations.index import database
from deployments.activations.index.database import index_path
from deployments.activations.index.index import Index
from deployments.activations.writer.writer import Writer

LONG_AGO = 1_700_000_000_000_000_000  # ns: files that changed just now are read again in any case
A = SessionName(None, "a")


def write(root, *made):
    """Write runs to new files, and close the store."""
    with closing(Index.open(root)) as index:
        writer = Writer(root, index)
        stored = [writer.submit(one.facts, one.batches).result() for one in made]
        writer.close()
    return stored


def told(index):
    """All that an index says of all sessions, and of files."""
    names = [SessionName(one["owner"], one["id"]) for one in index.sessions()]
    return [(index.session(name), sorted(index.files(name)), index.pinned()) for name in names]


def said_by_files(root):
    return sorted((path.parent.name, run.run_id) for path in root.glob("*/*/*.arrow") for run in runs(path))


def listed(index):
    return sorted((run["session_id"], run["run_id"]) for run in index.runs(limit=None))


@pytest.fixture
def root(make, tmp_path):
    """A store that is closed: two sessions of two files each, of two runs, which changed long ago."""
    root = tmp_path / "root"
    root.mkdir()
    for turn in range(2):
        for session, owner in (("a", None), ("b", "alice")):
            names = [f"{session}{turn}{number}" for number in range(2)]
            write(root, *(make(run, session_id=session, tags={"of": session}, owner=owner) for run in names))
    for path in root.glob("*/*/*.arrow"):
        os.utime(path, ns=(LONG_AGO, LONG_AGO))
    (root / "_/a/.pinned").touch()
    index_path(root).unlink()
    Index.open(root).close()
    return root


@pytest.fixture
def reads(root, monkeypatch):
    """The names of the files that are read from here on."""
    seen, read = [], database.whole_runs
    monkeypatch.setattr(database, "whole_runs", lambda path: seen.append(path.name) or read(path))
    return seen


# ---- the database is only a copy of what the files say


def test_a_start_over_known_files_reads_none_and_says_the_same_also_of_what_was_sealed_just_now(make, root, reads):
    write(root, make("new", session_id="b"))
    with closing(Index.open(root)) as index, closing(Index.scanned(root)) as scanned:
        assert len(listed(index)) == 9
        assert index.pinned() == {A}
        assert told(index) == told(scanned)
    reads.clear()
    Index.open(root).close()
    with closing(Index.reading(root)) as index:
        assert len(listed(index)) == 9
    assert reads == []


def test_a_file_that_grew_was_replaced_or_removed_while_closed_is_read_again_and_no_other(make, root, reads, tmp_path):
    files = sorted(root.glob("*/*/*.arrow"))
    assert len(files) == 4
    (tmp_path / "other").mkdir()
    write(tmp_path / "other", make("longer-than-those", session_id="a"))
    [other] = (tmp_path / "other").glob("*/a/*.arrow")
    files[0].write_bytes(files[0].read_bytes()[:-100])
    shutil.copyfile(other, files[1])
    files[2].unlink()
    reads.clear()
    with closing(Index.open(root)) as index:
        assert listed(index) == said_by_files(root)
        assert ("a", "longer-than-those") in listed(index)
        assert sorted(reads) == sorted(path.name for path in files[:2])
        shutil.rmtree(root / "alice")
        index.look()
        assert listed(index) == said_by_files(root)


def overwritten(path):
    data = bytearray(path.read_bytes())
    data[4096:] = os.urandom(len(data) - 4096)
    path.write_bytes(data)


def of_another_layout(path):
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("PRAGMA user_version = 7")


DAMAGES = {
    "removed": Path.unlink,
    "garbage": lambda path: path.write_bytes(b"no database at all" * 1000),
    "torn": lambda path: os.truncate(path, path.stat().st_size // 2),
    "overwritten": overwritten,
    "of-another-layout": of_another_layout,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_whatever_became_of_the_database_the_files_give_the_same_answers(root, damage, make):
    with closing(Index.open(root)) as index:
        before = told(index)
    damage(index_path(root))
    with closing(Index.open(root)) as index:
        assert told(index) == before
    write(root, make("after", session_id="a"))
    with closing(Index.open(root)) as index:
        assert listed(index) == said_by_files(root)
    assert len(said_by_files(root)) == 9


def test_a_database_that_is_damaged_while_it_is_open_is_made_again_also_for_who_reads(root, make):
    index, reader = Index.open(root), ActivationReader(str(root))
    assert reader._index.pinned() == {A}
    writer = Writer(root, index)
    for path in index_path(root).parent.glob(f"{index_path(root).stem}*"):
        with path.open("r+b") as file:
            file.write(os.urandom(path.stat().st_size))
    index._database.execute("PRAGMA shrink_memory")  # what it holds of the file's pages
    made = make("after", session_id="a")
    writer.submit(made.facts, made.batches).result()
    assert listed(index) == said_by_files(root)
    assert index.pinned() == {A}
    writer.close()
    assert listed(reader._index) == said_by_files(root)
    index.close()


def test_where_the_disk_has_no_room_for_the_database_runs_are_stored_and_listed_once_there_is(root, make, caplog):
    index = Index.open(root)
    [pages] = index._database.execute("PRAGMA page_count").fetchone()
    index._database.execute(f"PRAGMA max_page_count = {pages}")
    writer = Writer(root, index)
    for i in range(5):
        one = make(f"more{i}", session_id="a", tags={"long": "x" * 5000})
        writer.submit(one.facts, one.batches).result()
    assert "not up to date until it can be written: database or disk is full" in caplog.text
    assert {("a", "a00"), ("b", "b11")} < set(listed(index)) < set(said_by_files(root))
    writer.close()
    index._database.execute(f"PRAGMA max_page_count = {pages * 100}")
    index._again = 0.0  # half a minute has gone
    assert listed(index) == said_by_files(root)
    index.close()


def test_links_foreign_and_crafted_files_keep_no_other_from_being_served(root, make, caplog):
    with closing(Index.scanned(root)) as index:
        before = index.sessions()
    good = {"run_id": "r", "session_id": "a", "model": "m", "created": 1.0, "prompt_tokens": 1, "tokens": 1}
    about = [
        {},
        [],
        *(good | bad for bad in ({"tags": 7}, {"created": "now"}, {"sample_id": [1]}, {"created": float("nan")})),
    ]
    described = [(b"no JSON", good), (b"{}", good), (b"[]", good), *((None, facts) for facts in about)]
    for number, (description, facts) in enumerate(described):
        [batch] = make("r", session_id="a").batches
        batch = batch.replace_schema_metadata({b"vitrine": description or batch.schema.metadata[b"vitrine"]})
        metadata = {"run_id": "r", "batch": "0", "batches": "1", "run": json.dumps(facts)}
        with pa.ipc.new_file(str(root / "_/a" / f"{number}.arrow"), batch.schema) as file:
            file.write_batch(batch, custom_metadata=metadata)
    (root / "linked").symlink_to(root / "_")
    (root / "_/linked").symlink_to(root / "_/a")
    (root / "_/a/link.arrow").symlink_to(next((root / "alice/b").iterdir()))
    (root / "_/a/empty.arrow").touch()
    (root / "_/a/notes.txt").write_text("x")
    (root / "a file").write_text("x")
    sizes = {f"_/a/{path.name}": path.stat().st_size for path in (root / "_/a").glob("[0-9e]*.arrow")}
    with closing(Index.open(root)) as index:
        assert index.sessions() == before
        assert {file.path: file.bytes for file in index.files(A)} == sizes  # their bytes count
    assert "0.arrow is not read to its end" in caplog.text


@pytest.mark.parametrize("of", ["whole_runs", "is_sealed", "pread"])
def test_a_file_that_could_not_be_read_is_no_shorter_one_and_listed_once_it_can_be(root, monkeypatch, of):
    index_path(root).unlink()
    monkeypatch.setattr("deployments.activations.index.index._AGAIN_S", 0.0)
    pread, left = os.pread, iter(range(20))

    def fails(*args):
        if of == "pread" and next(left, None) is not None:
            return pread(*args)
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(*((os, "pread") if of == "pread" else (database, of)), fails)
        index = Index.open(root)
        if of == "pread":
            with pytest.raises(OSError, match="Input/output"):
                runs(root / "alice/b")
    assert listed(index) == said_by_files(root)
    index.close()


# ---- names, filters and pages


texts = st.sampled_from(["a", "b", "a=b", '"', "\n", "\u00e9", '"a":"b"', "%"])
times = st.sampled_from([0.0, 1.5, 2.0, 1e9])
made_runs = st.lists(
    st.fixed_dictionaries(
        {"session_id": st.sampled_from("stu"), "created": times, "sample_id": st.none() | texts}
        | {"tags": st.dictionaries(texts, texts, max_size=3), "owner": st.sampled_from([None, "alice"])}
    ),
    min_size=1,
    max_size=12,
)
filters = st.builds(
    Filter,
    session=st.none() | st.sampled_from("stuv"),
    model=st.sampled_from([None, "model", "other"]),
    since=st.none() | times,
    until=st.none() | times,
    sample_id=st.none() | texts,
    tags=st.lists(st.tuples(texts, texts), max_size=2).map(tuple),
    runs=st.none() | st.lists(st.sampled_from(["r0", "r1", "r2", "r99"]), max_size=3).map(tuple),
    owner=st.sampled_from([None, "", "alice", "bob"]),
)


def fits(facts, filter):
    """A filter in plain words."""
    return (
        filter.session in (None, facts.session_id)
        and filter.model in (None, facts.model)
        and (filter.since is None or facts.created >= filter.since)
        and (filter.until is None or facts.created < filter.until)
        and filter.sample_id in (None, facts.sample_id)
        and all(facts.tags.get(name) == value for name, value in filter.tags)
        and (filter.runs is None or facts.run_id in filter.runs)
        and filter.owner in (None, facts.owner or "")
    )


def paged(ask, limit, key):
    """All items of a list, page by page."""
    found = ask(limit, None)
    while page := ask(limit, key(found[-1])) if found else []:
        assert len(page) <= limit
        found += page
    return found


@settings(max_examples=settings().max_examples // 2)
@given(made_runs, st.lists(filters, min_size=1, max_size=5), st.integers(1, 4))
def test_every_filter_gives_the_runs_that_fit_page_by_page_from_the_writer_and_from_files(make, drawn, asked, limit):
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        made = [make(f"r{i}", {"p": torch.zeros(1 + i % 3, 2)}, **facts) for i, facts in enumerate(drawn)]
        sizes = {run.run_id: run.bytes for run in write(root, *made)}
        for index in (Index.open(root), Index.scanned(root)):
            for filter in [*asked, EVERYTHING]:
                check(index, filter, [one.facts for one in made if fits(one.facts, filter)], limit, sizes)
            index.close()


def check(index, filter, fitting, limit, sizes):
    fitting = sorted(fitting, key=lambda facts: (facts.created, facts.run_id))
    found = paged(lambda *page: index.runs(filter, *page), limit, lambda run: run["run_id"])
    assert [run["run_id"] for run in found] == [facts.run_id for facts in fitting]
    assert [(run["tags"], run["owner"]) for run in found] == [(facts.tags, facts.owner) for facts in fitting]
    key = lambda one: f"{one['id']}@{one['owner'] or ''}"  # noqa: E731
    sessions = paged(lambda *page: index.sessions(*page, filter), limit, key)
    counts = Counter(facts.session for facts in fitting)
    assert {SessionName(one["owner"], one["id"]): one["runs"] for one in sessions} == counts
    assert [key(one) for one in sessions] == sorted(map(key, sessions))
    for one in sessions:
        name = SessionName(one["owner"], one["id"])
        own = [facts for facts in fitting if facts.session == name]
        assert one["tokens"] == sum(facts.tokens for facts in own)
        assert (one["created"], one["updated"]) == (own[0].created, own[-1].created)
        if filter._replace(session=None, owner=None) == EVERYTHING:
            whole = index.session(name)
            assert [run["run_id"] for run in whole["runs"]] == [facts.run_id for facts in own]
            assert one["bytes"] == sum(file["bytes"] for file in whole["files"])
        else:
            assert one["bytes"] == sum(sizes[facts.run_id] for facts in own)
