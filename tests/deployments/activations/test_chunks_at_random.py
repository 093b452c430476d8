"""Runs in chunks, in any order, with kills at any byte: exactly the finished runs are there."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from deployments.activations import read_run, runs
from deployments.activations.facts import FileInfo, RunInfo, SessionName, StoreError
from deployments.activations.index.index import Index
from deployments.activations.segments.columns import to_batch
from deployments.activations.writer.recovery import recover
from deployments.activations.writer.writer import Writer

SESSIONS = ("a", "b")
NAMES = st.tuples(st.sampled_from(SESSIONS), st.sampled_from(["r0", "r1", "r2"]))
SIZES = st.lists(st.integers(1, 3), min_size=1, max_size=2)  # rows of each batch of a chunk


def batch(session, run_id, values, first):
    segment = FileInfo(session, "model", None, "x", {}, {})
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
        self.root = root
        recover(root)
        self.writers.append(Writer(root, Index.open(root)))

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
        future = self.writers[-1].append(SessionName(None, name[0]), name[1], part, batches)
        if self.refused(name):
            with pytest.raises(StoreError, match="abandoned|deleted|stored already"):
                future.result()
        else:
            future.result()
            self.open.setdefault(name, []).append(rows)

    @rule(name=NAMES, sizes=SIZES, bare=st.booleans())
    def write(self, name, sizes, bare):
        part, rows, batches = self.lay_out(name, [] if bare and self.open.get(name) else sizes)
        future = self.writers[-1].submit(RunInfo(name[1], name[0], "model", 0.0, 2, 9), batches, part)
        if self.refused(name):
            with pytest.raises(StoreError, match="abandoned|deleted|stored already"):
                future.result()
        else:
            path = Path(urlsplit(future.result().points["p"].uri).path)
            whole = torch.cat([*self.open.pop(name, []), rows])
            self.finished[name] = whole, path, path.stat().st_size

    @rule(name=NAMES)
    def abandon(self, name):
        self.writers[-1].abandon(SessionName(None, name[0]), name[1]).result()
        self.open.pop(name, None)
        if name not in self.finished:
            self.ended.add(name)

    @rule(session=st.sampled_from(SESSIONS))
    def delete(self, session):
        self.writers[-1].delete(SessionName(None, session)).result()
        self.ended |= {name for name in self.open if name[0] == session}
        self.open = {name: rows for name, rows in self.open.items() if name[0] != session}
        self.finished = {name: kept for name, kept in self.finished.items() if name[0] != session}

    @rule(which=st.integers(0), where=st.floats(0, 1))
    def kill(self, which, where):
        """Go on from the files as a kill would leave them, one of them without its last bytes."""
        shutil.copytree(self.root, self.top / str(len(self.writers)))
        for name in self.open:
            self.writers[-1].abandon(SessionName(None, name[0]), name[1]).result()  # the old store is only tidied up
        lost, self.open = self.open, {}
        old, self.ended = self.root, set()
        new = self.top / str(len(self.writers))
        files = sorted(new.glob("*/*/*.arrow"))
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
        for name, rows in lost.items():
            more = batch(*name, torch.zeros(1, 3), 0)
            with pytest.raises(StoreError, match="the parts before it are gone"):
                self.writers[-1].append(SessionName(None, name[0]), name[1], len(rows), [more]).result()

    @invariant()
    def what_is_finished_is_listed_and_nothing_else(self):
        found = [(run.session_id, run.run_id) for path in self.root.glob("*/*/*.arrow") for run in runs(path)]
        assert sorted(found) == sorted(self.finished)
        for index in (self.writers[-1]._index, Index.scanned(self.root)):
            assert {(run["session_id"], run["run_id"]) for run in index.runs(limit=None)} == set(self.finished)

    def read_back(self):
        for (session, run_id), (rows, path, _) in self.finished.items():
            for source in (path, self.root / "_" / session):
                run = read_run(source, run_id)
                assert torch.equal(run["p"], rows)
                assert run.positions.tolist() == run.token_ids.tolist() == list(range(len(rows)))

    def teardown(self):
        self.read_back()
        for writer in self.writers:
            writer.close()
            writer._index.close()
        self.read_back()
        shutil.rmtree(self.top)


TestChunks = Chunks.TestCase
TestChunks.settings = settings(stateful_step_count=25)
