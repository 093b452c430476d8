"""The catalogue lists what the files contain, by every filter, whatever happens to its database."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import deployments.activations
from deployments.activations import load, runs
from deployments.activations.catalogue import queries
from deployments.activations.catalogue import rows as filling
from deployments.activations.catalogue.catalogue import Catalogue
from deployments.activations.catalogue.database import NAME
from deployments.activations.facts import Entry, FileUpdate, PointType, StoredFile, StoreError
from deployments.activations.filters import EVERYTHING, Filter
from deployments.activations.segments.segments import whole_runs
from deployments.activations.writer.writer import Writer
from deployments.errors import RequestError

REPOSITORY = Path(deployments.activations.__file__).parents[2]
LONG_AGO = 1_700_000_000_000_000_000  # ns: files that changed just now are read again in any case


@pytest.fixture
def filled(make, tmp_path):
    """A catalogue that a writer kept, of three sessions with a run each and one more in the first."""
    catalogue = Catalogue()
    writer = Writer(tmp_path, catalogue)
    for run_id, session in [("r0", "c"), ("r1", "a"), ("r2", "b"), ("r3", "a")]:
        made = make(run_id, session_id=session, created=float(run_id[1]), tags={"k": "v"}, sample_id=run_id)
        writer.submit(made.facts, made.batches).result()
    yield catalogue
    writer.close()


def test_sessions_come_in_stable_pages(filled):
    assert [item["id"] for item in filled.sessions()] == ["a", "b", "c"]
    assert [item["id"] for item in filled.sessions(limit=1, after="a")] == ["b"]
    assert filled.sessions(after="c") == []


def test_a_session_sums_up_its_runs_and_files(filled, tmp_path):
    assert filled.sessions(limit=1) == [
        {
            "id": "a",
            "runs": 2,
            "tokens": 6,
            "bytes": sum(file.stat().st_size for file in (tmp_path / "a").iterdir()),
            "models": ["model"],
            "created": 1.0,
            "updated": 3.0,
        }
    ]


def test_a_session_lists_where_each_point_of_each_run_lies(filled, tmp_path):
    session = filled.session("a")
    [file] = (tmp_path / "a").iterdir()
    assert session["files"] == [{"uri": file.as_uri(), "bytes": file.stat().st_size, "sealed": False}]
    assert session["runs"][1] == {
        "run_id": "r3",
        "session_id": "a",
        "model": "model",
        "created": 3.0,
        "prompt_tokens": 2,
        "tokens": 3,
        "sample_id": "r3",
        "tags": {"k": "v"},
        "finish_reason": None,
        "offset": next(whole_runs(file)).bytes,
        "points": {"layers.0.output": {"uri": file.as_uri(), "first_row": 3, "shape": [3, 4], "dtype": "float32"}},
    }
    assert filled.session("unknown") is None


@given(
    known=st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 5), st.sampled_from(["m", "n"])), max_size=20),
    gone=st.sets(st.integers(0, 19), max_size=6),
    page=st.integers(1, 3),
)
def test_sessions_come_by_the_age_of_their_last_run_that_is_there(make, known, gone, page):
    catalogue, left = Catalogue(), {}
    for number, (session, created, model) in enumerate(known):
        facts = replace(make(f"r{number}", session_id=session).facts, created=float(created), model=model)
        uri = f"file:///store/{session}/{number:06}.arrow"
        entry = Entry(facts, uri, 0, 3, 100, {"layers.0.output": PointType((4,), "float32")}, 0)
        catalogue.add(FileUpdate(session, [entry], StoredFile(uri, 100, True, 3, 1)))
        if number in gone:
            catalogue.forget_files(uri)
        else:
            left[session] = max(left.get(session, 0.0), facts.created)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(queries, "_PAGE", page)
        assert list(catalogue.by_age()) == sorted(left.items(), key=lambda one: (one[1], one[0]))
    assert {session: catalogue.last_run(session) for session in left} == left
    assert catalogue.last_run("unknown") is None


def test_a_page_of_a_session_lists_the_files_of_its_runs_alone(make):
    catalogue = Catalogue()
    for number in range(500):
        facts = make(f"r{number}", created=float(number // 2)).facts
        uri = f"file:///store/session/{number // 2:06}.arrow"
        entry = Entry(facts, uri, 0, 3, 100, {"layers.0.output": PointType((4,), "float32")}, 100 * (number % 2))
        catalogue.add(FileUpdate("session", [entry], StoredFile(uri, 300, True, 3 * (1 + number % 2), 1)))
    pages, after = [], None
    while (page := catalogue.session("session", 10, after))["runs"]:
        pages.append(page)
        after = page["runs"][-1]["run_id"]
    for page in pages:
        lie = [run["points"]["layers.0.output"]["uri"] for run in page["runs"]]
        assert [file["uri"] for file in page["files"]] == sorted(set(lie))
        assert len(page["files"]) == 5
    files = [file for page in pages for file in page["files"]]
    assert len({file["uri"] for file in files}) == len(files) == 250
    assert sum(file["bytes"] for file in files) == pages[0]["bytes"]


def test_the_files_alone_give_the_same_catalogue(filled, tmp_path):
    rebuilt = Catalogue.rebuild(tmp_path)
    assert rebuilt.sessions() == filled.sessions()
    assert [rebuilt.session(name) for name in "abc"] == [filled.session(name) for name in "abc"]


def test_links_and_foreign_files_are_passed_over(filled, tmp_path_factory, tmp_path):
    (tmp_path / "linked").symlink_to(tmp_path / "a")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "a file").write_text("x")
    (tmp_path / "b" / "link.arrow").symlink_to(next((tmp_path / "a").iterdir()))
    (tmp_path / "b" / "empty.arrow").touch()
    (tmp_path / "b" / "notes.txt").write_text("x")
    assert Catalogue.rebuild(tmp_path).sessions() == filled.sessions()


# ---- the database is only a cache


@pytest.fixture
def root(make, tmp_path):
    """A store whose database is kept: two sessions of two files each, of two runs, which changed long ago."""
    root = tmp_path / "root"
    root.mkdir()
    for turn in range(2):
        write(root, make, [(f"{session}{turn}{i}", session) for session in "ab" for i in range(2)])
    for path in root.glob("*/*.arrow"):
        os.utime(path, ns=(LONG_AGO, LONG_AGO))
    opened(root).close()
    return root


def write(root, make, names, close=True):
    """Write runs to new files beside a catalogue of the directory."""
    catalogue = Catalogue.rebuild(root)
    writer = Writer(root, catalogue)
    for run_id, session in names:
        made = make(run_id, session_id=session, created=len(run_id) + 0.5, tags={"of": session})
        writer.submit(made.facts, made.batches).result()
    writer.close()
    catalogue.close()


def opened(root):
    return Catalogue.rebuild(root)


def told(catalogue):
    """All that a catalogue says of all sessions."""
    listed = {run["run_id"] for run in catalogue.runs(limit=None)}
    assert listed == {run["run_id"] for one in catalogue.sessions() for run in catalogue.session(one["id"])["runs"]}
    return [catalogue.session(one["id"]) for one in catalogue.sessions()]


def said_by_files(root):
    return sorted((path.parent.name, run.run_id) for path in root.glob("*/*.arrow") for run in runs(path))


def listed(catalogue):
    return sorted((run["session_id"], run["run_id"]) for run in catalogue.runs(limit=None))


@pytest.fixture
def reads(monkeypatch):
    """The names of the files that are read from here on."""
    seen = []
    read = filling.whole_runs
    monkeypatch.setattr(filling, "whole_runs", lambda path: seen.append(path.name) or read(path))
    return seen


def test_a_start_over_known_files_reads_none_and_says_the_same(root, reads):
    first = opened(root)
    assert len(listed(first)) == 8
    before = told(first)
    first.close()
    assert told(opened(root)) == before
    assert reads == []


def test_files_that_the_writer_sealed_just_now_are_known_too(make, root, reads):
    write(root, make, [("new", "b"), ("newer", "c")])
    assert listed(opened(root)) == said_by_files(root)
    assert reads == []


def test_a_file_that_grew_was_replaced_or_removed_while_closed_is_read_again_and_no_other(make, root, reads, tmp_path):
    files = sorted(root.glob("*/*.arrow"))
    assert len(files) == 4
    (tmp_path / "other").mkdir()
    write(tmp_path / "other", make, [("longer-than-those", "a")])
    [other] = (tmp_path / "other").glob("a/*.arrow")
    files[0].write_bytes(files[0].read_bytes()[:-100])
    shutil.copyfile(other, files[1])
    files[2].unlink()
    reads.clear()
    catalogue = opened(root)
    assert listed(catalogue) == said_by_files(root)
    assert ("a", "longer-than-those") in listed(catalogue)
    assert sorted(reads) == sorted(path.name for path in files[:2])
    catalogue.close()
    shutil.rmtree(root / "b")
    assert listed(opened(root)) == said_by_files(root)


def test_a_file_that_changed_and_shows_neither_another_size_nor_time_is_read_again_where_it_was_new(
    make, root, monkeypatch
):
    monkeypatch.setattr(filling, "_TICK_NS", 60_000_000_000)
    write(root, make, [("one", "c")])
    (root / NAME).unlink()
    opened(root).close()  # reads the file within a clock's tick of its last change, for all that is known
    [path] = (root / "c").iterdir()
    state = path.stat()
    path.write_bytes(path.read_bytes().replace(b"one", b"two"))
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert ("c", "two") in listed(opened(root))


def garbage(path):
    path.write_bytes(b"no database at all" * 1000)


def torn(path):
    os.truncate(path, path.stat().st_size // 2)


def overwritten(path):
    data = bytearray(path.read_bytes())
    data[4096:] = os.urandom(len(data) - 4096)
    path.write_bytes(data)


def of_another_layout(path):
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA user_version = 7")
    database.close()


def copied(path):
    other = path.with_name("copy")
    shutil.copyfile(path, other)
    with sqlite3.connect(other) as database:
        database.execute("DELETE FROM runs")  # a copy that was taken while it was written may be of two moments
    database.close()
    os.replace(other, path)


@pytest.mark.parametrize("damage", [Path.unlink, garbage, torn, overwritten, of_another_layout, copied])
def test_whatever_became_of_the_database_the_files_give_the_same_answers(root, damage, make):
    catalogue = opened(root)
    before = told(catalogue)
    catalogue.close()
    damage(root / NAME)
    with closing(opened(root)) as catalogue:
        assert told(catalogue) == before
    write(root, make, [("after", "a")])
    assert listed(opened(root)) == said_by_files(root)
    assert len(said_by_files(root)) == 9


def test_a_database_that_is_damaged_while_it_is_open_is_made_again(root, make, caplog):
    catalogue = opened(root)
    writer = Writer(root, catalogue)
    for path in root.glob(f"{NAME}*"):
        with path.open("r+b") as file:
            file.write(os.urandom(path.stat().st_size))
    catalogue._database.execute("PRAGMA shrink_memory")  # what it holds of the file's pages
    made = make("after", session_id="a")
    writer.submit(made.facts, made.batches).result()
    assert listed(catalogue) == said_by_files(root)
    writer.close()
    catalogue.close()
    assert listed(opened(root)) == said_by_files(root)


def test_where_the_disk_has_no_room_for_the_database_runs_are_stored_and_listed_once_there_is(root, make, caplog):
    catalogue = opened(root)
    [pages] = catalogue._database.execute("PRAGMA page_count").fetchone()
    catalogue._database.execute(f"PRAGMA max_page_count = {pages}")
    writer = Writer(root, catalogue)
    made = [make(f"more{i}", session_id="a", tags={"long": "x" * 5000}) for i in range(5)]
    for one in made:
        writer.submit(one.facts, one.batches).result()
    assert "not up to date until it can be written: database or disk is full" in caplog.text
    assert {("a", "a00"), ("b", "b11")} < set(listed(catalogue)) < set(said_by_files(root))
    assert catalogue._database.execute("PRAGMA database_list").fetchone()[2]
    writer.close()
    catalogue._database.execute(f"PRAGMA max_page_count = {pages * 100}")
    catalogue._again = 0.0  # half a minute has gone
    assert listed(catalogue) == said_by_files(root)
    catalogue.close()
    assert listed(opened(root)) == said_by_files(root)


def test_a_second_catalogue_of_a_directory_is_refused(root):
    first = opened(root)
    with pytest.raises(StoreError, match="another process keeps it"):
        opened(root)
    copy = Catalogue.copied(root)
    copy.drop("a")
    assert told(Catalogue.copied(root)) == told(first)
    assert {session for session, _ in listed(first)} == {"a", "b"}


def test_a_run_that_two_files_of_a_session_hold_is_listed_once_and_while_one_of_them_is_there(root):
    path = min((root / "a").iterdir())
    copy = path.with_name("zz.arrow")
    shutil.copyfile(path, copy)
    os.utime(copy, ns=(LONG_AGO, LONG_AGO))
    every = said_by_files(root)
    for gone in (None, path):
        if gone:
            gone.unlink()
        catalogue = opened(root)
        assert listed(catalogue) == sorted(set(every))
        summed = {one["id"]: one["runs"] for one in catalogue.sessions()}
        assert summed == Counter(session for session, _ in listed(catalogue))
        catalogue.close()


def test_runs_that_the_catalogue_was_never_told_of_are_found_at_the_next_start(root, make, tmp_path):
    write(tmp_path, make, [("lost", "c")])
    catalogue = opened(root)
    shutil.move(tmp_path / "c", root / "c")
    [path] = (root / "c").iterdir()
    state = path.stat()
    catalogue.add(FileUpdate("c", [], StoredFile(path.as_uri(), state.st_size, True, 3, state.st_mtime_ns)))
    catalogue.close()
    assert ("c", "lost") in listed(opened(root))


def test_a_file_that_provokes_an_error_keeps_no_other_from_being_served(root, caplog):
    before = listed(Catalogue.copied(root))
    facts = {"run_id": "r", "session_id": "a", "model": "m", "created": 1.0, "prompt_tokens": 1, "tokens": 1}
    schema = pa.schema([("x", pa.int32())], metadata={"vitrine": "no JSON"})
    batch = pa.record_batch([[1]], schema=schema)
    metadata = {"run_id": "r", "batch": "0", "batches": "1", "run": json.dumps(facts)}
    with pa.ipc.new_file(str(root / "a" / "0.arrow"), schema) as file:
        file.write_batch(batch, custom_metadata=metadata)
    sizes = {path.as_uri(): path.stat().st_size for path in (root / "a").glob("*.arrow")}
    with closing(opened(root)) as catalogue:
        assert listed(catalogue) == before
        assert catalogue.files("a") == sizes  # its bytes count
    assert "0.arrow is not read to its end" in caplog.text


STORE = """
import sys
from pathlib import Path
import torch
from deployments.activations.catalogue.catalogue import Catalogue
from deployments.activations.facts import RunFacts, SegmentFacts
from deployments.activations.segments.columns import to_batch
from deployments.activations.writer.writer import Writer

root, name = Path(sys.argv[1]), sys.argv[2]
writer = Writer(root, Catalogue.rebuild(root), segment_bytes=5000)
for i in range(10000):
    segment = SegmentFacts("s", "model", None, "x", {}, {})
    run_id = f"{name}-{i}"
    batch = to_batch(segment, run_id=run_id, sample_id=None, positions=[0], token_ids=[0], prompt_tokens=1,
                     points={"p": torch.zeros(1, 8)})
    writer.submit(RunFacts(run_id, "s", "model", float(i), 1, 1), [batch]).result()
    print(run_id, flush=True)
"""


@pytest.mark.long  # test_killed kills writers, too
def test_after_kills_the_catalogue_says_what_the_files_say(tmp_path, reads):
    stored = set()
    for turn in range(2):
        command = [sys.executable, "-c", STORE, str(tmp_path), str(turn)]
        with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as child:
            stored |= {next(child.stdout).strip() for _ in range(20 + 7 * turn)}
            child.send_signal(signal.SIGKILL)
            child.communicate()
        reads.clear()
        catalogue = opened(tmp_path)
        assert listed(catalogue) == said_by_files(tmp_path)
        assert stored <= {run_id for _, run_id in listed(catalogue)}
        assert len(reads) < len(list(tmp_path.glob("s/*.arrow")))  # what was sealed is known
        catalogue.close()


# ---- filters and pages

texts = st.sampled_from(["a", "b", "a=b", '"', "\n", "\u00e9", '"a":"b"', "%"])
times = st.sampled_from([0.0, 1.5, 2.0, 1e9])
made_runs = st.lists(
    st.fixed_dictionaries(
        {"session_id": st.sampled_from("stu"), "created": times, "sample_id": st.none() | texts}
        | {"tags": st.dictionaries(texts, texts, max_size=3)}
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
    among=st.none() | st.lists(st.sampled_from("stuv"), max_size=3).map(tuple),
    runs=st.none() | st.lists(st.sampled_from(["r0", "r1", "r2", "r99"]), max_size=3).map(tuple),
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
        and (filter.among is None or facts.session_id in filter.among)
        and (filter.runs is None or facts.run_id in filter.runs)
    )


def paged(ask, limit):
    """All items of a list, page by page."""
    found = ask(limit, None)
    while page := ask(limit, found[-1].get("run_id") or found[-1]["id"]) if found else []:
        assert len(page) <= limit
        found += page
    return found


@given(made_runs, st.lists(filters, min_size=1, max_size=5), st.integers(1, 4))
def test_every_filter_gives_the_runs_that_fit_page_by_page_from_the_writer_and_from_files(make, drawn, asked, limit):
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        kept = opened(root)
        writer = Writer(root, kept)
        made = [make(f"r{i}", {"p": torch.zeros(1 + i % 3, 2)}, **facts) for i, facts in enumerate(drawn)]
        stored = [writer.submit(one.facts, one.batches).result() for one in made]
        sizes = {run.run_id: run.bytes for run in stored}
        every = [one.facts for one in made]
        writer.close()
        for catalogue in (kept, Catalogue.copied(root)):
            for filter in [*asked, EVERYTHING]:
                check(catalogue, filter, [facts for facts in every if fits(facts, filter)], limit, sizes)
        kept.close()


def check(catalogue, filter, fitting, limit, sizes):
    fitting = sorted(fitting, key=lambda facts: (facts.created, facts.run_id))
    found = paged(lambda *page: catalogue.runs(filter, *page), limit)
    assert [run["run_id"] for run in found] == [facts.run_id for facts in fitting]
    assert [(run["tags"], run["created"]) for run in found] == [(facts.tags, facts.created) for facts in fitting]
    sessions = paged(lambda *page: catalogue.sessions(*page, filter), limit)
    counts = Counter(facts.session_id for facts in fitting)
    assert {one["id"]: one["runs"] for one in sessions} == counts
    assert [one["id"] for one in sessions] == sorted(counts)
    for one in sessions:
        own = [facts for facts in fitting if facts.session_id == one["id"]]
        assert one["tokens"] == sum(facts.tokens for facts in own)
        assert (one["created"], one["updated"]) == (own[0].created, own[-1].created)
        whole = catalogue.session(one["id"], filter=filter)
        assert {**whole, "runs": len(whole["runs"]), "files": None} == {**one, "files": None}
        assert [run["run_id"] for run in whole["runs"]] == [facts.run_id for facts in own]
        by_page = lambda *page, id=one["id"]: catalogue.session(id, *page, filter)["runs"]  # noqa: E731
        assert paged(by_page, limit) == whole["runs"]
        if filter._replace(session=None, among=None) == EVERYTHING:
            assert one["bytes"] == sum(file["bytes"] for file in whole["files"])
        else:
            assert one["bytes"] == sum(sizes[facts.run_id] for facts in own)


def test_a_page_behind_a_run_that_is_none_is_refused(filled):
    for ask in (
        lambda: filled.runs(after="never"),
        lambda: filled.runs(Filter("b"), after="r1"),
        lambda: filled.session("b", after="r1"),
    ):
        with pytest.raises(RequestError, match="there is no run") as refused:
            ask()
        assert refused.value.field == "after"


# ---- places of runs in their files


def test_a_run_is_read_at_its_offset_whatever_is_before_it(make, tmp_path):
    points = [{"p": torch.randn(3, 40)} for _ in range(4)]
    catalogue = Catalogue.rebuild(tmp_path)
    writer = Writer(tmp_path, catalogue)
    for i, point in enumerate(points):
        made = make(f"r{i}", point, parts=1 + i % 2)
        writer.submit(made.facts, made.batches).result()
    writer.close()
    [path] = (tmp_path / "session").iterdir()
    offsets = [run["offset"] for run in catalogue.session("session")["runs"]]
    assert [run.offset for run in whole_runs(path)] == offsets
    assert all(before < after for before, after in pairwise(offsets))
    for i, offset in enumerate(offsets):
        assert torch.equal(load(path, f"r{i}", offset=offset)["p"], points[i]["p"])
    data = bytearray(path.read_bytes())
    data[offsets[1] : offsets[2]] = b"\xff" * (offsets[2] - offsets[1])
    path.write_bytes(data)
    assert torch.equal(load(path, offset=offsets[3])["p"], points[3]["p"])
    with pytest.raises(ValueError, match="r3"):
        load(path, "r3")
    with pytest.raises(ValueError, match="directory"):
        load(path.parent, "r3", offset=offsets[3])


def test_a_file_that_could_not_be_read_is_listed_once_it_can_be(root, monkeypatch):
    (root / NAME).unlink()
    monkeypatch.setattr("deployments.activations.catalogue.catalogue._AGAIN_S", 0.0)
    with monkeypatch.context() as patched:
        patched.setattr(
            "deployments.activations.catalogue.rows.whole_runs", lambda path: (_ for _ in ()).throw(OSError(5, ""))
        )
        catalogue = opened(root)
    assert listed(catalogue) == said_by_files(root)


def test_an_error_of_the_disk_in_a_file_is_no_end_of_it(root, monkeypatch):
    (root / NAME).unlink()
    monkeypatch.setattr("deployments.activations.catalogue.catalogue._AGAIN_S", 0.0)
    pread, left = os.pread, iter(range(20))

    def fails_after_a_while(*args):
        if next(left, None) is None:
            raise OSError(errno.EIO, "Input/output error")
        return pread(*args)

    with monkeypatch.context() as patched:
        patched.setattr(os, "pread", fails_after_a_while)
        catalogue = opened(root)
        with pytest.raises(OSError, match="Input/output"):
            runs(root / "b")
    assert listed(catalogue) == said_by_files(root)
    catalogue.close()
    assert listed(opened(root)) == said_by_files(root)


def test_a_directory_that_was_away_while_the_database_failed_is_known_again_when_it_is_back(root, tmp_path):
    catalogue = opened(root)
    catalogue._database.close()
    away = root.rename(tmp_path / "away")
    with pytest.raises(StoreError, match="unable to open database file"):
        catalogue.sessions()
    away.rename(root)
    assert listed(catalogue) == said_by_files(root)


def test_a_directory_that_is_away_when_files_are_to_be_looked_at_again_fails_its_runs_and_nothing_else(
    root, make, tmp_path, monkeypatch
):
    (root / NAME).unlink()
    monkeypatch.setattr("deployments.activations.catalogue.catalogue._AGAIN_S", 0.0)
    with monkeypatch.context() as patched:
        patched.setattr(filling, "is_sealed", lambda path: (_ for _ in ()).throw(OSError(errno.EIO, "")))
        catalogue = opened(root)
    early, late = make("early"), make("late")
    away = root.rename(tmp_path / "away")
    writer = Writer(root, catalogue)
    with pytest.raises(StoreError, match="put the directory back"):
        writer.submit(early.facts, early.batches).result()
    assert catalogue.sessions() == []
    away.rename(root)
    assert writer.submit(late.facts, late.batches).result().run_id == "late"
    assert listed(catalogue) == said_by_files(root)
    writer.close()


def test_a_filter_that_sqlite_refuses_is_an_error_and_the_catalogue_stays_on_its_disk(root, make, caplog):
    catalogue = opened(root)
    before = listed(catalogue)
    tags = tuple((f"name{i}", "value") for i in range(1000))  # deeper than SQLite's expressions may be
    for _ in range(2):
        with pytest.raises(StoreError, match="Expression tree is too large"):
            catalogue.runs(Filter(tags=tags))
        with pytest.raises(StoreError, match="Expression tree is too large"):
            catalogue.sessions(filter=Filter(tags=tags))
    assert "made again" not in caplog.text
    writer = Writer(root, catalogue)
    made = make("after", session_id="a")
    writer.submit(made.facts, made.batches).result()
    writer.close()
    assert sorted(listed(catalogue)) == sorted([*before, ("a", "after")])
    with closing(sqlite3.connect(root / NAME)) as database:  # what another process finds on the disk
        assert database.execute("SELECT count(*) FROM runs WHERE run_id = 'after'").fetchone() == (1,)
