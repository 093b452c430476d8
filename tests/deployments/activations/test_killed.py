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

from deployments.activations import load
from deployments.activations.catalogue.catalogue import Catalogue
from deployments.activations.files.disk import DELETED
from deployments.activations.segments.segments import whole_runs
from deployments.activations.segments.verify import verify
from deployments.activations.writer.recovery import recover
from tests.deployments.activations.killed_writer import CALLS, made

PROGRAM = Path(__file__).with_name("killed_writer.py")
SELDOM = ("rename", "unlink", "rmdir", "truncate", "mkdir")
KILLS = 10  # one behind the other, below one root; half of them where that is not a long test


@contextlib.contextmanager
def forking() -> Iterator[Callable[[dict[str, Any]], tuple[list[list[str]], int]]]:
    """Gives what runs a job in a child, and gives what that said, by lines and words, and its exit code."""
    command = [sys.executable, str(PROGRAM)]
    env = os.environ | {"PYTHONPATH": str(PROGRAM.parents[3]), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin
        assert process.stdout

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


@pytest.fixture(scope="module")
def forked() -> Iterator[Callable[[dict[str, Any]], tuple[list[list[str]], int]]]:
    with forking() as run:
        yield run


class ClientLog:
    """What the clients of a store below one root were told."""

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

    def check(self, root: Path) -> None:
        """Compare it with what a store that starts there finds."""
        recover(root).join()
        catalogue = Catalogue.rebuild(root)
        sessions = {item["id"]: catalogue.session(item["id"]) for item in catalogue.sessions()}
        for session in self.deleting - sessions.keys():
            self.forget(session)
        listed = {
            (name, run["run_id"]): run["points"]["p"]["uri"] for name, held in sessions.items() for run in held["runs"]
        }
        assert self.stored <= listed.keys() <= self.begun
        self.deleting.clear()  # what was not done will not be done later
        for (session, run_id), uri in listed.items():
            facts, values = made(session, run_id)
            run = load(uri, run_id)
            assert run.facts == facts
            assert run["p"].dtype == values.dtype
            assert torch.equal(run["p"], values)
            assert run.positions.tolist() == run.token_ids.tolist() == list(range(facts.tokens))
        left = [path.name for path in root.iterdir() if path.name.startswith(".")]
        assert [name for name in left if not name.startswith((".catalogue.", ".store-id", ".state.sqlite"))] == []
        for path in root.glob("*/*"):
            assert verify(path).state == "whole"
            assert list(whole_runs(path))


def moments(chance: random.Random, number: int) -> Iterator[dict[str, Any]]:
    """Moments at which to kill: at a system call, or behind a time."""
    for _ in range(number):
        if chance.random() < 0.25:
            yield {"after_s": chance.uniform(0, 0.15)}
        else:
            when = chance.choice(["before", "half", "behind"])
            call = chance.choice(CALLS)
            yield {"at": [call, 1 + int(chance.paretovariate(0.5)) % (3 if call in SELDOM else 100), when]}


def copied(root: Path, to: Path) -> Path:
    """Copy what a killed writer left, without deleted sessions, which its `rm` may still be removing."""
    return shutil.copytree(root, to, ignore=shutil.ignore_patterns(f"{DELETED}*"))


def kill_again_and_again(forked, folder: Path, seed: int, kills: int) -> tuple[int, int]:
    """Kill writers below one root, each where the one before was killed; how many were, and what was stored."""
    root, known, chance, killed, stored = folder / "root", ClientLog(), random.Random(seed), 0, 0
    root.mkdir()
    for turn, moment in enumerate(moments(chance, kills)):
        job = {"root": str(root), "prefix": f"{seed}-{turn}", "seed": chance.random(), "steps": 30}
        said, code = forked(job | {"segment_bytes": chance.choice([4_000, 20_000, 100_000])} | moment)
        assert code in (0, -signal.SIGKILL)
        killed += code != 0
        stored += sum(words[0] == "stored" for words in said)
        known.read(said)
        kept = Catalogue.copied(root)  # by the database as it was left, and the files
        sure = {name for name in known.stored if name[0] not in known.deleting}
        assert sure <= {(run["session_id"], run["run_id"]) for run in kept.runs(limit=None)} <= known.begun
        kept.close()
        copy = copied(root, folder / f"after-{turn}")  # the next writer finds all as it was left
        known.check(copy)
        shutil.rmtree(copy)
    return killed, stored


def few_and_many(few: int, many: int) -> list[Any]:
    """Seeds, all but a few of which are for the long tests."""
    return [*range(few), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(few, many))]


@pytest.mark.parametrize("seed", few_and_many(1, 45))
def test_what_was_answered_before_a_kill_reads_back_whole_and_nothing_else_is_listed(forked, tmp_path, seed):
    killed, stored = kill_again_and_again(forked, tmp_path, seed, KILLS if seed else KILLS // 2)
    print(f"{killed} killed, {stored} stored")
    assert killed
    assert stored
