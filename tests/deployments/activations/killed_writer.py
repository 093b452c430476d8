"""A program that forks writers which are killed: `python killed_writer.py`, driven by test_killed.

It loads everything that a writer needs once, without a second thread, and forks for each job, a line of JSON on its
standard input. The child prints its progress in lines; the parent prints `END`.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deployments.activations.catalogue.catalogue import Catalogue
from deployments.activations.facts import RunFacts, SegmentFacts, StoreError
from deployments.activations.segments.columns import to_batch
from deployments.activations.writer.recovery import recover
from deployments.activations.writer.writer import Writer

CALLS = ("open", "write", "fsync", "truncate", "rename", "unlink", "rmdir", "mkdir", "close")
SESSIONS = ("a", "b", "c")
SCHEMAS = (((3,), "float32"), ((2, 5), "bfloat16"), ((40,), "float64"))


def made(session: str, run_id: str) -> tuple[RunFacts, torch.Tensor]:
    """What a run of this name holds: its facts and its rows."""
    random = np.random.default_rng(zlib.crc32(f"{session}/{run_id}".encode()))
    shape, dtype = SCHEMAS[int(random.integers(len(SCHEMAS)))]
    rows = int(random.integers(1, 40))
    values = torch.from_numpy(random.standard_normal((rows, *shape))).to(getattr(torch, dtype))
    return RunFacts(run_id, session, "model", float(rows), rows, rows, tags={"rows": str(rows)}), values


def batches(session: str, run_id: str, most: int) -> list[Any]:
    """The rows of `made` as record batches, `most` of them at most."""
    facts, values = made(session, run_id)
    segment = SegmentFacts(session, "model", None, "x", {}, {})
    parts = [part.tolist() for part in np.array_split(np.arange(facts.tokens), most)]
    named = {"run_id": run_id, "sample_id": None, "prompt_tokens": facts.tokens}
    return [
        to_batch(segment, **named, positions=part, token_ids=part, points={"p": values[part[0] : part[-1] + 1]})
        for part in parts
        if part
    ]


def say(*words: str) -> None:
    os.write(1, (" ".join(words) + "\n").encode())


def killed_at(call: str, number: int, when: str) -> None:
    """End this process at the n-th system call of a kind: before it, behind it, or, of a write, in the middle."""
    real, seen = getattr(os, call), 0

    def replaced(*args: Any, **named: Any) -> Any:
        nonlocal seen
        if args and args[0] == 1:  # what is said
            return real(*args, **named)
        seen += 1
        if seen < number:
            return real(*args, **named)
        if when == "half" and call == "write":
            real(args[0], args[1][: max(1, len(args[1]) // 2)])
        elif when == "behind":
            real(*args, **named)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")

    setattr(os, call, replaced)


class Client:
    """Stores runs, takes some back, and says what it begins and what it is answered."""

    def __init__(self, writer: Writer, prefix: str, chance: random.Random) -> None:
        self.writer = writer
        self.chance = chance
        self.names = (f"{prefix}-{number}" for number in range(10**9))
        self.open: list[tuple[str, str, list[Any], int]] = []

    def batches(self, session: str, run_id: str) -> list[Any]:
        return batches(session, run_id, self.chance.randint(1, 4))

    def short(self) -> None:
        """Some whole runs at once."""
        waiting = []
        for _ in range(self.chance.randint(1, 5)):
            session, run_id = self.chance.choice(SESSIONS), next(self.names)
            say("begin", session, run_id)
            future = self.writer.submit(made(session, run_id)[0], self.batches(session, run_id))
            waiting.append((session, run_id, future))
        for session, run_id, future in waiting:
            future.result()
            say("stored", session, run_id)

    def begin(self) -> None:
        """The first part of a long run."""
        session, run_id = self.chance.choice(SESSIONS), next(self.names)
        batches = self.batches(session, run_id)
        self.writer.append(session, run_id, 0, batches[:1]).result()
        self.open.append((session, run_id, batches, 1))

    def go_on(self) -> None:
        """The next part of a long run, or its end."""
        if not self.open:
            return
        session, run_id, batches, part = self.open.pop(self.chance.randrange(len(self.open)))
        try:
            if part < len(batches):
                self.writer.append(session, run_id, part, [batches[part]]).result()
                self.open.append((session, run_id, batches, part + 1))
            else:
                say("begin", session, run_id)
                self.writer.submit(made(session, run_id)[0], [], part).result()
                say("stored", session, run_id)
        except StoreError as error:
            if "deleted" not in str(error):
                raise
            say("failed", session, run_id)

    def abandon(self) -> None:
        if self.open:
            session, run_id, _, _ = self.open.pop()
            self.writer.abandon(session, run_id).result()
            say("failed", session, run_id)

    def delete(self) -> None:
        session = self.chance.choice(SESSIONS)
        say("deleting", session)
        self.writer.delete(session).result()
        say("deleted", session)

    def go(self, steps: int) -> None:
        kinds: list[Callable[[], None]] = [self.short, self.begin, self.go_on, self.abandon, self.delete]
        for step in self.chance.choices(kinds, weights=[8, 4, 8, 1, 1], k=steps):
            step()


def child(job: dict[str, Any]) -> None:
    if at := job.get("at"):
        killed_at(*at)
    root = Path(job["root"])
    recover(root)
    writer = Writer(root, Catalogue.rebuild(root), segment_bytes=job["segment_bytes"], open_segments=4)
    Client(writer, job["prefix"], random.Random(job["seed"])).go(job["steps"])
    writer.close()


def main() -> None:
    batches("a", "none", 1)  # Arrow loads much at its first use
    assert threading.active_count() == 1, "who forks has no other threads"
    for line in sys.stdin:
        job = json.loads(line)
        process = os.fork()
        if not process:
            try:
                child(job)
                os._exit(0)
            except BaseException:  # noqa: BLE001 - printed for the test, which fails
                say("error", json.dumps(traceback.format_exc()))
                os._exit(1)
        if "after_s" in job:
            time.sleep(job["after_s"])
            os.kill(process, signal.SIGKILL)  # it is this process's child until it is waited for
        _, status = os.waitpid(process, 0)
        say("END", str(os.waitstatus_to_exitcode(status)))


if __name__ == "__main__":
    main()
