"""Runs in chunks, in any order, with kills at any byte: exactly the finished runs are there."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

import pyarrow as pa
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from deployments.activations import load, runs
from deployments.activations.catalogue.catalogue import Catalogue
from deployments.activations.facts import RunFacts, SegmentFacts, StoreError
from deployments.activations.segments.columns import to_batch
from deployments.activations.segments.segments import is_sealed
from deployments.activations.writer.recovery import recover
from deployments.activations.writer.writer import Writer

SESSIONS = ("a", "b")
NAMES = st.tuples(st.sampled_from(SESSIONS), st.sampled_from(["r0", "r1", "r2"]))
SIZES = st.lists(st.integers(1, 3), min_size=1, max_size=2)  # rows of each batch of a chunk


def batch(session, run_id, values, first):
    segment = SegmentFacts(session, "model", None, "x", {}, {})
    index = range(first, first + len(values))
    return to_batch(
        segment, run_id=run_id, sample_id=None, positions=index, token_ids=index, prompt_tokens=2, points={"p": values}
    )


class Chunks(RuleBasedStateMachine):
    """The store beside what a user knows of it."""

    def __init__(self):
        super().__init__()
        self.top = Path(tempfile.mkdtemp())
        self.writers: list[Writer] = []
        self.open: dict[tuple[str, str], list[torch.Tensor]] = {}  # each chunk's rows
        self.finished: dict[tuple[str, str], tuple[torch.Tensor, Path, int]] = {}  # rows, file, its length then
        self.ended: set[tuple[str, str]] = set()
        self.start(self.top / "0")

    def start(self, root):
        root.mkdir(exist_ok=True)
        self.root, self.most = root, Counter[str]()
        self.before = {session: len(self.files(session)) for session in SESSIONS}
        recover(root)
        self.writers.append(Writer(root, Catalogue.rebuild(root)))

    def files(self, session):
        return sorted((self.root / session).glob("*"))

    def lay_out(self, name, sizes):
        done = self.open.get(name, [])
        first = sum(len(rows) for rows in done)
        rows = torch.randn(sum(sizes), 3)
        starts = [sum(sizes[:k]) for k in range(len(sizes))]
        batches = [
            batch(*name, rows[start : start + size], first + start) for start, size in zip(starts, sizes, strict=True)
        ]
        return len(done), rows, batches

    def refused(self, name):
        return name in self.ended or name in self.finished

    @rule(name=NAMES, sizes=SIZES)
    def append(self, name, sizes):
        part, rows, batches = self.lay_out(name, sizes)
        future = self.writers[-1].append(*name, part, batches)
        if self.refused(name):
            with pytest.raises(StoreError, match="abandoned|deleted|stored already"):
                future.result()
        else:
            future.result()
            self.open.setdefault(name, []).append(rows)
            self.most[name[0]] = max(self.most[name[0]], sum(session == name[0] for session, _ in self.open))

    @rule(name=NAMES, sizes=SIZES, bare=st.booleans())
    def write(self, name, sizes, bare):
        part, rows, batches = self.lay_out(name, [] if bare and self.open.get(name) else sizes)
        future = self.writers[-1].submit(RunFacts(name[1], name[0], "model", 0.0, 2, 9), batches, part)
        if self.refused(name):
            with pytest.raises(StoreError, match="abandoned|deleted|stored already"):
                future.result()
        else:
            path = Path(urlsplit(future.result().points["p"].uri).path)
            whole = torch.cat([*self.open.pop(name, []), rows])
            self.finished[name] = whole, path, path.stat().st_size

    @rule(name=NAMES)
    def abandon(self, name):
        self.writers[-1].abandon(*name).result()
        self.open.pop(name, None)
        if name not in self.finished:
            self.ended.add(name)

    @rule(session=st.sampled_from(SESSIONS))
    def delete(self, session):
        self.writers[-1].delete(session).result()
        self.ended |= {name for name in self.open if name[0] == session}
        self.open = {name: rows for name, rows in self.open.items() if name[0] != session}
        self.finished = {name: kept for name, kept in self.finished.items() if name[0] != session}
        self.before[session] = 0

    @rule(name=NAMES, skipped=st.integers(1, 2))
    def a_part_with_others_missing_before_it_is_refused(self, name, skipped):
        part, _, batches = self.lay_out(name, [1])
        with pytest.raises(StoreError):
            self.writers[-1].append(*name, part + skipped, batches).result()

    @rule(which=st.integers(0), where=st.floats(0, 1))
    def kill(self, which, where):
        """Go on from the files as a kill would leave them, one of them without its last bytes."""
        shutil.copytree(self.root, self.top / str(len(self.writers)))
        for name, rows in list(self.open.items()):
            self.writers[-1].abandon(*name).result()  # the old store is only tidied up
            del self.open[name]
            self.ended.add((*name, len(rows)))
        old, lost = self.root, {item for item in self.ended if len(item) == 3}
        self.ended = set()
        new = self.top / str(len(self.writers))
        files = sorted(new.glob("*/*.arrow"))
        cut, length = None, 0
        if files:
            cut = files[which % len(files)]
            length = round(where * cut.stat().st_size)
            with cut.open("r+b") as file:
                file.truncate(length)
        self.finished = {
            name: (rows, new / path.relative_to(old), end) for name, (rows, path, end) in self.finished.items()
        }
        safe = {name for name, (_, path, end) in self.finished.items() if path != cut or end <= length}
        found = {(run.session_id, run.run_id) for path in files for run in runs(path)}
        assert safe <= found <= set(self.finished)
        self.finished = {name: kept for name, kept in self.finished.items() if name in found}
        self.start(new)
        for session, run_id, parts in lost:
            more = batch(session, run_id, torch.zeros(1, 3), 0)
            with pytest.raises(StoreError, match="the parts before it are gone"):
                self.writers[-1].append(session, run_id, parts, [more]).result()

    @invariant()
    def what_is_finished_is_listed_and_nothing_else(self):
        found = [(run.session_id, run.run_id) for path in self.root.glob("*/*.arrow") for run in runs(path)]
        assert sorted(found) == sorted(self.finished)
        rebuilt = Catalogue.copied(self.root)
        told = {(s["id"], run["run_id"]) for s in rebuilt.sessions() for run in rebuilt.session(s["id"])["runs"]}
        assert told == set(self.finished)

    @invariant()
    def there_are_no_more_files_than_runs_were_open_at_once_and_one(self):
        for session in SESSIONS:
            assert len(self.files(session)) <= self.before[session] + self.most[session] + 1

    def read_back(self):
        for (session, run_id), (rows, path, _) in self.finished.items():
            for source in (path, self.root / session):
                run = load(source, run_id)
                assert torch.equal(run["p"], rows)
                assert run.positions.tolist() == run.token_ids.tolist() == list(range(len(rows)))

    def teardown(self):
        self.read_back()
        for writer in self.writers:
            writer.close()
        self.read_back()
        for path in self.root.glob("*/*.arrow"):
            if is_sealed(path):
                here = [rows for rows, file, _ in self.finished.values() if file == path]
                assert pa.ipc.open_file(str(path)).read_all().num_rows == sum(len(rows) for rows in here)
        shutil.rmtree(self.top)


TestChunks = Chunks.TestCase
TestChunks.settings = settings(stateful_step_count=25)
