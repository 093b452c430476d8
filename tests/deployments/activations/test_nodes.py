"""Writers on several nodes, in the store's directory or in their own."""

from __future__ import annotations

import asyncio
import inspect
import os
import pickle
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load as tensors

from deployments.accounts import Account
from deployments.activations import load, runs
from deployments.activations.__main__ import main
from deployments.activations.actors.store import ActivationStore
from deployments.activations.catalogue.catalogue import Catalogue
from deployments.activations.catalogue.database import NAME
from deployments.activations.catalogue.directories import ElsewhereError
from deployments.activations.catalogue.manifest import Manifest
from deployments.activations.catalogue.replaying import replay, snapshot_lines, write_snapshot
from deployments.activations.export.exports import export
from deployments.activations.facts import FileUpdate, StoreError, names_a_session
from deployments.activations.files.disk import scan
from deployments.activations.files.places import Place
from deployments.activations.filters import Filter
from deployments.activations.limits import Retention
from deployments.activations.nodes.files import SegmentReader
from deployments.activations.nodes.receiving import Home
from deployments.activations.nodes.writer import NodeWriter
from deployments.activations.reader.tables import table
from deployments.activations.reader.training import ActivationRows
from deployments.activations.state.nodes import Node, node_of, uri_of
from deployments.activations.writer.recovery import mark
from deployments.activations.writer.writer import Writer as SegmentWriter
from deployments.errors import RequestError

ROOT = Path(__file__).parents[3]
POINT = "layers.0.output"
RUN = 64 << 10  # about what a run of `big` takes


def on_two_nodes(root: Path, part: str) -> list[str]:
    """What the script prints. In a process of its own, since this one may have joined the tests' shared cluster."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled"}
    script = [sys.executable, Path(__file__).with_name("two_nodes.py"), str(root), part]
    done = subprocess.run(script, env=env, capture_output=True, text=True, timeout=500, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith(("both", "a "))]


@pytest.mark.long  # one more cluster; below, the same in one process
def test_each_node_writes_files_of_its_own_and_the_store_knows_them_all(tmp_path):
    assert len(on_two_nodes(tmp_path, "write")) == 4


@pytest.mark.long
def test_a_node_that_is_drained_uploads_what_is_open(tmp_path):
    assert len(on_two_nodes(tmp_path, "drain")) == 1


# ---- a store and a node's writer in one process, which call each other as over Ray


class Call:
    """An answer on its way, as a reference of Ray's is."""

    def __init__(self, future):
        self._future = future

    def __await__(self):
        return asyncio.wrap_future(self._future).__await__()

    def future(self):
        return self._future


class Method:
    def __init__(self, call):
        self.remote = call


class Handle:
    """An actor's handle. While `reached` is not set, nobody answers."""

    def __init__(self, nodes, actor):
        self._nodes, self._actor = nodes, actor
        self.reached = threading.Event()
        self.reached.set()

    def __getattr__(self, name):
        return Method(lambda *args: Call(self._nodes.begin(self._of(name, *args))))

    async def _of(self, name, *args):
        if not self.reached.is_set():
            raise TimeoutError("nobody answers")
        if name == "place":  # without Ray
            return Home("head", mark(self._nodes.root), "")
        answer = getattr(self._actor(), name)(*args)
        return await answer if inspect.isawaitable(answer) else answer


class Writer(NodeWriter):
    def _serve(self):
        """Of these tests, the node's reader is here."""


class Nodes:
    """A store, here, and the writer of another node, there, whose directory is its own or the store's."""

    def __init__(self, here, there, reader_of, archive=None):
        self.root, self.there_root, self._reader_of, self._archive = here, there, reader_of, archive
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.here = ActivationStore(str(here), archive=archive or "")
        self.store = Handle(self, lambda: self.here)
        self.writer = Handle(self, lambda: self.there)
        self.reader = Handle(self, lambda: SegmentReader(str(self.there_root)))
        self.there = self.open_there()

    def open_there(self):
        async def opened():
            return Writer(str(self.there_root), self.store, self._archive, "ray-id", "10.0.0.2")

        return self.ask(opened())

    def begin(self, made):
        return asyncio.run_coroutine_threadsafe(made, self._loop)

    def ask(self, made):
        return self.begin(made).result(60)

    def append(self, made, part, fence=None):
        return self.ask(self.there.append(*made.facts_and_id, part, [FakeReference(made.batches[part])], 0, fence))

    def store_run(self, made, part=0, where=None, fence=None):
        where = where or self.there
        return self.ask(where.write(made.facts, [FakeReference(batch) for batch in made.batches[part:]], part, fence))

    def keep(self, now=None, **limits):
        return self.ask(self.here.retain(Retention(**limits), now))

    def start_store_again(self):
        """The store was killed, and comes back by itself."""
        self.here._writer.close()
        self.here._catalogue.close()
        self.here = ActivationStore(str(self.root))

    def start_node_again(self):
        self.there.close()
        self.there = self.open_there()

    def session(self, session_id):
        return self.ask(self._reader_of(self.here).session(session_id))

    def listed(self, session_id="session"):
        found = self.session(session_id)
        return [run["run_id"] for run in found["runs"]] if found else []

    def close(self):
        self.store.reached.set()
        self.there.close()
        self.here._writer.close()
        if self.here._archive:
            self.here._archive.close()
        self.here._catalogue.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()


class FakeReference:
    """A batch, as a reference of Ray's gives it."""

    def __init__(self, batch):
        self._batch = batch

    def __await__(self):
        return self._batch
        yield


@pytest.fixture(params=["own", "shared"])
def nodes(request, tmp_path, reader_of, monkeypatch):
    here = tmp_path / "here"
    monkeypatch.setattr("deployments.activations.actors.store.releases_nodes", lambda: False)
    monkeypatch.setattr("deployments.activations.nodes.writer.is_released", lambda: False)
    archive = request.getfixturevalue("bucket").uri("") if request.param == "archived" else None
    nodes = Nodes(here, here if request.param == "shared" else tmp_path / "there", reader_of, archive)
    monkeypatch.setattr("deployments.activations.nodes.files.writer_on", lambda *_: nodes.writer)
    monkeypatch.setattr("deployments.activations.nodes.files.reader_on", lambda *_: nodes.reader)
    for caller in ("actors.store", "nodes.files"):
        monkeypatch.setattr(f"deployments.activations.{caller}.node_writers", lambda root: [nodes.writer])
    monkeypatch.setattr(
        "deployments.activations.state.nodes.Nodes.is_alive", lambda self, node: nodes.writer.reached.is_set()
    )
    monkeypatch.setattr("deployments.activations.nodes.reporting.PAUSE_S", (0.05, 0.05))
    monkeypatch.setattr("deployments.activations.nodes.reporting.BEAT_S", 0.05)
    monkeypatch.setattr("deployments.activations.nodes.reporting.GATHER_S", 0.02)
    monkeypatch.setattr("deployments.activations.nodes.writer._JOIN_S", 60.0)
    monkeypatch.setattr("deployments.activations.actors.store._watch", lambda of: None)  # without Ray
    yield nodes
    nodes.close()


only_own = pytest.mark.parametrize("nodes", ["own"], indirect=True)
only_shared = pytest.mark.parametrize("nodes", ["shared"], indirect=True)
only_archived = pytest.mark.parametrize("nodes", ["archived"], indirect=True)


class Big:
    """A run of 64 KiB in four parts."""

    def __init__(self, make, run, session, created):
        self.facts, self.batches, self.points = make(
            run, {POINT: torch.randn(64, 256)}, session_id=session, parts=4, created=created
        )
        self.facts_and_id = session, run


@pytest.fixture
def big(make):
    return lambda run, session="session", created=1.0: Big(make, run, session, created)


def test_a_run_is_written_where_it_is_made_and_listed_by_the_store(nodes, big, eventually):
    made = big("r")
    stored = nodes.store_run(made)
    eventually(nodes.listed, lambda found: found == ["r"])
    assert torch.equal(load(stored.points[POINT].uri, "r")[POINT], made.points[POINT])
    [run] = nodes.session("session")["runs"]
    assert run["points"][POINT]["uri"] == stored.points[POINT].uri
    if nodes.there_root == nodes.root:
        assert (stored.node, run.get("node")) == (None, None)
        return
    assert not [item.name for item in nodes.root.iterdir() if names_a_session(item.name)]
    assert stored.node == run["node"] == "10.0.0.2"
    assert run["available"]
    nodes.writer.reached.clear()
    assert not nodes.session("session")["runs"][0]["available"]


def test_a_run_that_was_answered_and_not_reported_is_found_by_its_id(nodes, big, monkeypatch):
    monkeypatch.setattr("deployments.activations.nodes.reporting.GATHER_S", 60.0)
    nodes.store_run(big("r"))
    [run] = nodes.ask(nodes._reader_of(nodes.here).runs(Filter(runs=("r",))))
    assert run["run_id"] == "r"


def test_runs_are_withdrawn_on_all_nodes_unless_one_is_stored_or_does_not_answer(nodes, big, monkeypatch):
    monkeypatch.setattr("deployments.activations.nodes.reporting.GATHER_S", 60.0)  # the store is not told yet
    begun = big("begun")
    nodes.append(begun, 0)
    nodes.store_run(big("stored"))
    assert not nodes.ask(nodes.here.withdraw("session", ["unknown", "stored"]))
    assert nodes.ask(nodes.here.withdraw("session", ["begun", "unknown"]))
    with pytest.raises(StoreError):
        nodes.store_run(begun, 1)
    nodes.ask(nodes.here._flush())
    assert nodes.listed() == ["stored"]
    nodes.writer.reached.clear()
    assert not nodes.ask(nodes.here.withdraw("session", ["other"]))


def test_runs_are_stored_while_the_store_is_away_and_listed_when_it_is_back(nodes, big, eventually):
    nodes.store_run(big("a"))
    eventually(nodes.listed, lambda found: found == ["a"])
    nodes.store.reached.clear()
    for name in "bcd":
        nodes.store_run(big(name))
    nodes.start_store_again()
    nodes.store.reached.set()
    eventually(lambda: sorted(nodes.listed()), lambda found: found == ["a", "b", "c", "d"])


def test_a_node_keeps_few_reports_while_the_store_is_away_and_makes_the_rest_of_its_files(
    nodes, big, eventually, monkeypatch
):
    monkeypatch.setattr("deployments.activations.nodes.reporting.MOST", 3)
    nodes.store_run(big("first"))
    eventually(nodes.listed)
    nodes.store.reached.clear()
    waiting = list[int]()
    for number in range(10):
        nodes.store_run(big(f"r{number}", f"s{number}"))
        waiting.append(len(nodes.there._reporter._notes))
    assert max(waiting) <= 3
    nodes.store.reached.set()
    told = {f"s{number}": [f"r{number}"] for number in range(10)}
    eventually(lambda: {name: nodes.listed(name) for name in told}, lambda found: found == told)
    nodes.store_run(big("last"))
    eventually(nodes.listed, lambda found: found == ["first", "last"])


def test_a_writer_that_starts_again_tells_what_it_had_not_told(nodes, big, eventually):
    nodes.store_run(big("a"))
    eventually(nodes.listed, lambda found: found == ["a"])
    nodes.store.reached.clear()
    nodes.store_run(big("b"))
    nodes.there.close()
    nodes.store.reached.set()
    nodes.there = nodes.open_there()
    nodes.store_run(big("c"))
    eventually(lambda: sorted(nodes.listed()), lambda found: found == ["a", "b", "c"])


@only_shared
def test_a_node_joins_while_the_stores_directory_is_looked_through_and_runs_are_listed(
    nodes, big, eventually, monkeypatch
):
    nodes.store_run(big("a"))
    eventually(nodes.listed, lambda found: found == ["a"])
    gate, looking = threading.Event(), threading.Event()

    def slow(*args):
        looking.set()
        gate.wait()
        yield from scan(*args)

    for module in ("catalogue", "rows"):
        monkeypatch.setattr(f"deployments.activations.catalogue.{module}.scan", slow, raising=False)
    try:
        nodes.begin(nodes.here.join(Node("", "10.0.0.3", str(nodes.root), "other"))).result(10)
        assert looking.wait(10)
        assert nodes.listed() == ["a"]
    finally:
        gate.set()


@only_own
def test_a_node_with_its_own_directory_starts_and_stores_without_the_store(nodes, big, eventually, monkeypatch):
    monkeypatch.setattr("deployments.activations.nodes.writer._JOIN_S", 1.0)
    nodes.store_run(big("a"))
    nodes.store.reached.clear()
    nodes.start_node_again()
    nodes.store_run(big("b"))
    nodes.store.reached.set()
    eventually(lambda: sorted(nodes.listed()), lambda found: found == ["a", "b"])


@pytest.mark.parametrize("parts", [0, 2])
def test_a_late_run_of_another_node_does_not_become_part_of_a_session_that_another_key_claims(
    nodes, big, parts, eventually
):
    alice, bob = Account("alice", is_admin=False), Account("bob", is_admin=False)
    late, other = big("late"), big("other")
    fence = nodes.ask(nodes.here.claim("session", alice))
    for part in range(parts):
        nodes.append(late, part, fence=fence)
    nodes.store_run(big("first"), fence=fence)
    eventually(nodes.listed, lambda found: found == ["first"])
    assert nodes.ask(nodes.here.delete("session", alice)).away == ()
    nodes.store_run(other, fence=nodes.ask(nodes.here.claim("session", bob)))
    with pytest.raises(StoreError, match="deleted"):
        nodes.store_run(late, parts, fence=fence)
    assert [run.run_id for run in runs(nodes.there_root / "session")] == ["other"]
    eventually(nodes.listed, lambda found: found == ["other"])


@only_own
def test_a_run_on_another_nodes_disk_is_read_from_there_while_it_answers(nodes, big, eventually):
    made = big("r")
    nodes.store_run(made)
    eventually(nodes.listed)
    reader = nodes._reader_of(nodes.here)
    rows = nodes.ask(reader.rows("r", [[POINT]], "all", 1 << 20))
    assert torch.equal(tensors(rows)["0"], made.points[POINT])
    [file] = (nodes.there_root / "session").iterdir()
    file.unlink()
    with pytest.raises(RequestError, match="was removed") as gone:
        nodes.ask(reader.rows("r", [[POINT]], "all", 1 << 20))
    assert gone.value.status == 410
    nodes.writer.reached.clear()
    with pytest.raises(RequestError, match="is away") as away:
        nodes.ask(reader.rows("r", [[POINT]], "all", 1 << 20))
    assert (away.value.status, away.value.code) == (503, "node_away")


@only_own
def test_a_node_that_was_away_deletes_before_it_lists(nodes, big, eventually):
    nodes.store_run(big("a"))
    nodes.store_run(big("kept", "other"))
    eventually(lambda: nodes.listed() + nodes.listed("other"), lambda found: found == ["a", "kept"])
    nodes.there.close()
    nodes.writer.reached.clear()
    assert nodes.ask(nodes.here.delete("session")).away == ("10.0.0.2",)
    assert nodes.session("session") is None
    assert (nodes.there_root / "session").exists()
    nodes.writer.reached.set()
    nodes.there = nodes.open_there()
    nodes.store_run(big("again"))
    eventually(nodes.listed, lambda found: found == ["again"])
    assert [run.run_id for run in runs(nodes.there_root / "session")] == ["again"]
    assert nodes.listed("other") == ["kept"]


@only_own
def test_a_node_that_is_away_keeps_no_deletion_waiting_of_which_it_has_nothing(nodes, big, eventually):
    nodes.store_run(big("a"))
    eventually(nodes.listed)
    facts = big("b", "other")
    nodes.ask(nodes.here.write(facts.facts, [FakeReference(batch) for batch in facts.batches]))
    nodes.there.close()
    nodes.writer.reached.clear()
    assert nodes.ask(nodes.here.delete("other")).away == ()
    nodes.here._nodes.mark_lost()
    assert nodes.ask(nodes.here.delete("session")).away == ("10.0.0.2",)
    nodes.writer.reached.set()
    nodes.there = nodes.open_there()
    nodes.store_run(big("again"))
    eventually(nodes.listed, lambda found: found == ["again"])


@only_own
def test_a_node_that_is_away_for_a_week_counts_as_lost_until_it_is_back(nodes, big, eventually):
    nodes.store_run(big("a"))
    nodes.store_run(big("b", "other"))
    eventually(lambda: nodes.listed() + nodes.listed("other"), lambda found: found == ["a", "b"])
    nodes.there.close()
    nodes.writer.reached.clear()
    day, known = 86400, nodes.here._nodes
    known.mark_lost(now := time.time())
    known.mark_lost(now + 6.9 * day)
    assert "lost" not in nodes.session("session")["runs"][0]
    known.mark_lost(now + 7.1 * day)
    assert nodes.session("session")["runs"][0]["lost"]
    assert nodes.ask(nodes.here.delete("session")).away == ()
    assert known.waiting("session")  # a node that comes back all the same deletes
    nodes.writer.reached.set()
    nodes.there = nodes.open_there()
    eventually(lambda: not (nodes.there_root / "session").exists())
    eventually(lambda: nodes.session("other")["runs"][0].get("available"))
    known.mark_lost(now + 8 * day)
    nodes.writer.reached.clear()
    known.mark_lost(now + 9 * day)
    assert "lost" not in nodes.session("other")["runs"][0]  # it is away since a day ago


@only_shared
def test_a_node_may_see_the_stores_directory_under_another_path(nodes, big, eventually, monkeypatch):
    tell = nodes.here.report
    told = []

    async def noted(key, notes, *more):
        told.extend(note.file.uri for note in notes)
        return await tell(key, notes, *more)

    monkeypatch.setattr(nodes.here, "report", noted)
    nodes.store_run(big("a"))
    eventually(nodes.listed, lambda found: found == ["a"])
    eventually(lambda: told)
    assert not [uri for uri in told if str(nodes.there_root) in uri]
    assert nodes.session("session")["files"][0]["uri"].startswith(nodes.root.as_uri())


@only_own
def test_a_directory_that_goes_with_its_node_is_refused_unless_it_is_archived(nodes, big, monkeypatch, bucket):
    monkeypatch.setattr("deployments.activations.actors.store.releases_nodes", lambda: True)
    for _ in range(2):  # also where it is there already
        nodes.start_node_again()
        with pytest.raises(StoreError, match="autoscaler can release .*set archive to a bucket.*all nodes share"):
            nodes.ask(nodes.there.ready())
    with pytest.raises(StoreError, match="autoscaler can release this node"):
        nodes.store_run(big("a"))
    nodes._archive = bucket.uri("")
    nodes.start_node_again()
    nodes.store_run(big("a"))


@only_archived
def test_a_node_that_is_drained_uploads_what_it_has(nodes, big, bucket, eventually, monkeypatch):
    nodes.store_run(big("a"))
    eventually(nodes.listed, lambda found: found == ["a"])
    assert bucket.objects() == []  # the file is open for half a minute
    monkeypatch.setattr("deployments.activations.nodes.writer.is_released", lambda: True)
    eventually(bucket.objects, limit_s=20)
    eventually(lambda: nodes.session("session")["runs"][0]["archived"])
    nodes.writer.reached.clear()
    assert nodes.session("session")["runs"][0]["available"]


@only_own
def test_a_session_that_is_too_old_stays_where_a_node_has_a_later_run_of_it(nodes, big, eventually):
    nodes.store_run(big("old"))
    eventually(nodes.listed, lambda found: found == ["old"])
    nodes.store.reached.clear()
    nodes.store_run(big("new", created=1e10))
    assert nodes.keep(max_session_age_s=60) == ["session"]  # by what is known here
    nodes.store.reached.set()
    eventually(lambda: sorted(nodes.listed()), lambda found: found == ["new", "old"])


def test_a_node_hears_that_a_quota_is_reached_and_that_there_is_room_again(nodes, big, eventually):
    nodes.keep(max_store_bytes=2 * RUN)
    nodes.store_run(big("a"))
    nodes.store_run(big("b"))

    def refused():
        try:
            nodes.ask(nodes.there.check_room("session", 1))
        except StoreError as error:
            return str(error)
        return ""

    assert "store's quota" in eventually(refused)
    with pytest.raises(StoreError, match="store's quota"):
        nodes.store_run(big("c"))
    assert nodes.ask(nodes.here.delete("session"))
    eventually(refused, lambda said: not said)
    nodes.store_run(big("d"))
    eventually(nodes.listed, lambda found: found == ["d"])


def test_the_oldest_sessions_of_a_node_make_room(nodes, big, eventually):
    nodes.keep(max_store_bytes=3 * RUN + RUN // 2, delete_oldest=True)
    for number in range(8):
        nodes.store_run(big(f"r{number}", f"s{number}", float(number)))
        eventually(lambda number=number: nodes.listed(f"s{number}"))
    there = nodes.there_root
    eventually(
        lambda: sorted(item.name for item in there.iterdir() if names_a_session(item.name)),
        lambda found: found == ["s5", "s6", "s7"],
    )
    used = lambda: nodes.here._writer.ask(lambda manager: manager.used().total()).result()  # noqa: E731
    eventually(lambda: used() == sum(file.stat().st_size for file in there.glob("s*/*.arrow")))


def test_a_pinned_session_that_is_not_deleted_keeps_the_runs_on_their_way(nodes, big, eventually):
    nodes.store_run(big("a"))
    eventually(nodes.listed)
    nodes.ask(nodes.here.pin("session", True))
    long = big("long")
    nodes.append(long, 0)
    with pytest.raises(RequestError, match="unpin it"):
        nodes.ask(nodes.here.delete("session"))
    nodes.store_run(long, 1)
    eventually(lambda: sorted(nodes.listed()), lambda found: found == ["a", "long"])


@only_own
def test_what_is_told_to_the_store_is_small(nodes, big, eventually, monkeypatch):
    told = []
    tell = nodes.here.report

    async def noted(key, notes, *more):
        told.extend(notes)
        return await tell(key, notes, *more)

    monkeypatch.setattr(nodes.here, "report", noted)
    for number in range(120):
        nodes.store_run(big(f"r{number}"))
    eventually(lambda: len(nodes.ask(nodes._reader_of(nodes.here).session("session"))["runs"]), lambda n: n >= 100)
    eventually(lambda: told)
    assert all(node_of(note.file.uri) and len(pickle.dumps(note)) < 100_000 for note in told)


@only_own
def test_runs_of_a_file_that_was_told_in_part_are_listed_when_the_node_joins_again(nodes, big, eventually, monkeypatch):
    monkeypatch.setattr("deployments.activations.nodes.reporting.BATCH", 1)
    nodes.store_run(big("first"))
    eventually(nodes.listed)
    nodes.store.reached.clear()
    for number in range(4):
        nodes.store_run(big(f"r{number}"))
    tell, told = nodes.here.report, []

    async def once(key, notes, *more):
        if len(told) == 2:
            told.append(None)
            raise TimeoutError("the store was killed")
        told.append(notes)
        return await tell(key, notes, *more)

    monkeypatch.setattr(nodes.here, "report", once)
    nodes.store.reached.set()
    eventually(lambda: sorted(nodes.listed()), lambda found: found == ["first", "r0", "r1", "r2", "r3"])
    assert None in told


@only_own
def test_who_reads_the_heads_directory_is_told_which_runs_lie_on_which_node(
    nodes, big, make, eventually, tmp_path, capsys
):
    made = make("run-here")
    nodes.here._writer.submit(made.facts, made.batches).result()
    for name in ("run-a", "run-b"):
        nodes.store_run(big(name))
    eventually(lambda: sorted(nodes.listed()), lambda found: found == ["run-a", "run-b", "run-here"])
    root = nodes.root
    for read in (
        lambda: load("run-a", root=root),
        lambda: load(root, "run-a"),
        lambda: table(root, runs=["run-a", "run-here"]),
    ):
        with pytest.raises(ElsewhereError, match=r"1 run lies on node 10\.0\.0\.2, .*root='http://HOST:8000'"):
            read()
    for read in (
        lambda: runs(root / "session"),
        lambda: table(root, session="session"),
        lambda: ActivationRows(root, [POINT], batch_size=1),
        lambda: export(root, tmp_path / "to", "pt", session="session"),
    ):
        with pytest.raises(ElsewhereError, match=r"2 runs lie on node 10\.0\.0\.2, .*pull http://HOST:8000 SESSION"):
            read()
    assert load("run-here", root=root).facts == load(root, "run-here").facts == made.facts
    assert table(root, session="session", runs=["run-here"])["run_id"].unique().to_pylist() == ["run-here"]
    with pytest.raises(FileNotFoundError, match="no run 'run-c'"):
        load("run-c", root=root)
    assert main(["ls", "session", "--dir", str(root)]) == 0
    assert "run-a" in capsys.readouterr().out
    assert main(["verify", "--dir", str(root)]) == 1  # of what is here it says all the same what it is
    said = capsys.readouterr()
    assert "open" in said.out
    assert "2 runs lie on node 10.0.0.2" in said.err


def test_a_snapshot_of_the_bucket_names_segments_of_nodes_as_all_others(tmp_path, big):
    made, manifest = big("r"), Manifest(Place(None, "", "s3://bucket/prefix"), root=Path("/store"))
    root = tmp_path / "kept"
    catalogue = Catalogue.rebuild(root)
    writer = SegmentWriter(tmp_path / "other", other := Catalogue.rebuild(tmp_path / "other"))
    writer.submit(made.facts, made.batches).result()
    writer.close()
    [(session_id, file)] = other.all_files()
    entries = other.of_file(file.uri)
    uri = uri_of("key", "session/a.arrow")
    catalogue.add(FileUpdate(session_id, entries, file._replace(uri=uri)))
    catalogue.change((), lambda database: database.execute("UPDATE files SET archived = 1"))
    write_snapshot(root / NAME, tmp_path / "snapshot")
    for knows_node in (False, True):
        merged = Catalogue.rebuild(tmp_path / f"merged-{knows_node}")
        if knows_node:
            merged.add(FileUpdate(session_id, entries, file._replace(uri=uri)))
        with closing(sqlite3.connect(tmp_path / "snapshot")) as snapshot:
            lines = list(snapshot_lines(snapshot))
        merged.change((), partial(replay, part="name", lines=lines, manifest=manifest))
        assert [run.uri for run in merged.entries("session")] == [
            uri if knows_node else "s3://bucket/prefix/session/a.arrow"
        ]
        assert [run.archived for run in merged.entries("session")] == [True]
        assert merged.sizes() == {"session": file.bytes}
        merged.close()
    catalogue.close()
    other.close()
