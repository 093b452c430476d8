"""Writers that are killed at any system call and at any time: exactly the answered runs are there, complete."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from deployments.activations import read_run
from deployments.activations.files.disk import DELETED
from deployments.activations.index.database import index_path
from deployments.activations.index.index import Index
from deployments.activations.segments.segments import whole_runs
from deployments.activations.segments.verify import verify
from deployments.activations.writer.recovery import recover
from tests.deployments.activations.killed_writer import made

PROGRAM = Path(__file__).with_name("killed_writer.py")
CALLS = ("open", "fsync", "truncate", "rename", "unlink", "mkdir", "link", "close")
SELDOM = ("rename", "unlink", "link", "truncate", "mkdir")
KILLS = 10  # one behind the other, below one root; half of them where that is not a long test
Fork = Callable[[dict[str, Any]], tuple[list[list[str]], int]]


@contextlib.contextmanager
def forking() -> Iterator[Fork]:
    """Gives what runs a job in a child, and gives what that said, by lines and words, and its exit code."""
    env = os.environ | {"PYTHONPATH": str(PROGRAM.parents[3]), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, str(PROGRAM)], env=env, text=True, **pipes) as process:

        def run(job: dict[str, Any]) -> tuple[list[list[str]], int]:
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
            said = []
            while (words := process.stdout.readline().split())[0] != "END":
                assert words[0] != "error", json.loads(" ".join(words[1:]))
                said.append(words)
            return said, int(words[1])

        yield run
        process.stdin.close()


class ClientLog:
    """What the clients of a store below one root were told; names are sessions' and runs'."""

    def __init__(self) -> None:
        self.begun: set[tuple[str, str]] = set()
        self.stored: set[tuple[str, str]] = set()
        self.deleting: set[str] = set()  # sessions whose deletion was not answered

    def read(self, lines: list[list[str]]) -> None:
        for what, session, *run_id in lines:
            name = (session, *run_id)
            if what == "begin":
                self.begun.add(name)
            elif what == "stored":
                self.stored.add(name)
            elif what == "failed":
                self.begun.discard(name)
            elif what == "deleting":
                self.deleting.add(session)
            elif what == "deleted":
                self.forget(session)

    def forget(self, session: str) -> None:
        self.deleting.discard(session)
        self.begun = {name for name in self.begun if name[0] != session}
        self.stored = {name for name in self.stored if name[0] != session}

    def looked_through(self, root: Path) -> tuple[int, int]:
        """How many stored runs a store that starts there does not list, and how many that it lists cannot be read."""
        known = Index.reading(root)
        recover(root, known.sealed() if known else {}).join()
        with contextlib.closing(Index.open(root)) as index:
            uris = {(entry.facts.session_id, entry.facts.run_id): entry.uri for entry in index.entries()}
        for session in self.deleting - {session for session, _ in uris}:
            self.forget(session)
        self.deleting.clear()  # what was not done will not be done later
        return len(self.stored - uris.keys()), sum(not is_whole(uri, *name) for name, uri in uris.items())

    def check(self, root: Path) -> None:
        """Compare it with what a store that starts there finds, all of which is whole."""
        assert self.looked_through(root) == (0, 0)
        with contextlib.closing(Index.scanned(root)) as index:
            assert {(entry.facts.session_id, entry.facts.run_id) for entry in index.entries()} <= self.begun
        assert {path.name for path in root.iterdir()} <= {"_", ".lock", ".limits.json"}
        for path in root.glob("*/*/*"):
            assert verify(path).state == "whole"
            assert list(whole_runs(path))


def is_whole(uri: str, session: str, run_id: str) -> bool:
    """Whether a run reads back bit for bit."""
    facts, values = made(session, run_id)
    try:
        run = read_run(uri, run_id, verify=True)
    except (ValueError, OSError):
        return False
    same = run.facts == facts and run["p"].dtype == values.dtype and torch.equal(run["p"], values)
    return same and run.positions.tolist() == run.token_ids.tolist() == list(range(facts.tokens))


def kills(run: Fork, folder: Path, chance: random.Random, prefix: str, number: int) -> Iterator[tuple[Any, ...]]:
    """Kill writers one after the other; gives each one's words and exit code, the log, and a copy of what it left.

    The copy has no deleted sessions, which its `rm` may still be removing, and an index as the writer left it.
    """
    root, known, copy = folder / f"root-{prefix}", ClientLog(), folder / "after"
    root.mkdir()
    for turn in range(number):
        call, job = chance.choice(CALLS), {"root": str(root), "prefix": f"{prefix}-{turn}", "seed": chance.random()}
        at = [call, 1 + int(chance.paretovariate(0.5)) % (3 if call in SELDOM else 100)]
        kill = {"after_s": chance.uniform(0, 0.15)} if chance.random() < 0.25 else {}
        kill = kill or {"at": [*at, chance.choice(["before", "behind"])]}
        said, code = run(job | {"segment_bytes": chance.choice([4_000, 20_000, 100_000])} | kill)
        known.read(said)
        shutil.copytree(root, copy, ignore=shutil.ignore_patterns(f"{DELETED}*"))
        for path in index_path(root).parent.glob(f"{index_path(root).name}*"):
            shutil.copyfile(path, str(index_path(copy)) + path.name.removeprefix(index_path(root).name))
        yield said, code, known, copy
        shutil.rmtree(copy)
        for path in index_path(copy).parent.glob(f"{index_path(copy).name}*"):
            path.unlink()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 45))])
def test_what_was_answered_before_a_kill_reads_back_whole_and_nothing_else_is_listed(tmp_path, seed):
    killed, stored, chance = 0, 0, random.Random(seed)
    with forking() as run:
        for said, code, known, copy in kills(run, tmp_path, chance, str(seed), KILLS if seed else KILLS // 2):
            assert code in (0, -signal.SIGKILL)
            killed += code != 0
            stored += sum(words[0] == "stored" for words in said)
            known.check(copy)
    assert killed
    assert stored
