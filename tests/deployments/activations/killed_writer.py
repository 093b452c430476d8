"""A program that forks writers which are killed: `python killed_writer.py`, driven by test_killed.

It loads everything that a writer needs once, without a second thread, and forks for each job, a line of JSON on its
standard input. The child prints its progress in lines; the parent prints `END`.
"""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import sys
import time
import traceback
import zlib
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deployments.activations.facts import FileInfo, RunInfo, SessionName, StoreError
from deployments.activations.index.index import Index
from deployments.activations.segments.columns import to_batch
from deployments.activations.writer.recovery import recover
from deployments.activations.writer.writer import Writer

SESSIONS = ("a", "b", "c")
SCHEMAS = (((3,), "float32"), ((2, 5), "bfloat16"), ((40,), "float64"))


def made(session: str, run_id: str) -> tuple[RunInfo, torch.Tensor]:
    """What a run of this name holds: its facts and its rows."""
    random = np.random.default_rng(zlib.crc32(f"{session}/{run_id}".encode()))
    shape, dtype = SCHEMAS[int(random.integers(len(SCHEMAS)))]
    rows = int(random.integers(1, 40))
    values = torch.from_numpy(random.standard_normal((rows, *shape))).to(getattr(torch, dtype))
    return RunInfo(run_id, session, "model", float(rows), rows, rows, tags={"rows": str(rows)}), values


def batches(session: str, run_id: str, most: int) -> list[Any]:
    """The rows of `made` as record batches, `most` of them at most."""
    facts, values = made(session, run_id)
    segment = FileInfo(session, "model", None, "x", {}, {})
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
    """End this process at the n-th system call of a kind: before it, or behind it."""
    real, calls = getattr(os, call), count(1)

    def replaced(*args: Any, **named: Any) -> Any:
        if (args and args[0] == 1) or next(calls) < number:  # what is said does not count
            return real(*args, **named)
        if when == "behind":
            real(*args, **named)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")

    setattr(os, call, replaced)


class Client:
    """Stores runs, takes some back, and says what it begins and what it is answered."""

    def __init__(self, writer: Writer, prefix: str, chance: random.Random) -> None:
        self.writer, self.chance = writer, chance
        self.names = (f"{prefix}-{number}" for number in count())
        self.open: list[tuple[str, str, list[Any], int]] = []

    def new(self) -> tuple[str, str, list[Any]]:
        session, run_id = self.chance.choice(SESSIONS), next(self.names)
        return session, run_id, batches(session, run_id, self.chance.randint(1, 4))

    def short(self) -> None:
        """Some whole runs at once."""
        waiting = []
        for _ in range(self.chance.randint(1, 5)):
            session, run_id, rows = self.new()
            say("begin", session, run_id)
            waiting.append((session, run_id, self.writer.submit(made(session, run_id)[0], rows)))
        for session, run_id, future in waiting:
            future.result()
            say("stored", session, run_id)

    def begin(self) -> None:
        """The first part of a long run."""
        self.open.append((*self.new(), 0))
        self.go_on(-1)

    def go_on(self, which: int | None = None) -> None:
        """The next part of a long run, or its end."""
        if not self.open:
            return
        session, run_id, rows, part = self.open.pop(self.chance.randrange(len(self.open)) if which is None else which)
        try:
            if part < len(rows):
                self.writer.append(SessionName(None, session), run_id, part, [rows[part]]).result()
                self.open.append((session, run_id, rows, part + 1))
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
            self.writer.abandon(SessionName(None, session), run_id).result()
            say("failed", session, run_id)

    def delete(self) -> None:
        session = self.chance.choice(SESSIONS)
        say("deleting", session)
        self.writer.delete(SessionName(None, session)).result()
        say("deleted", session)


def child(job: dict[str, Any]) -> None:
    if at := job.get("at"):
        killed_at(*at)
    root, chance = Path(job["root"]), random.Random(job["seed"])
    known = Index.reading(root)
    recover(root, known.sealed() if known else {})
    writer = Writer(root, Index.open(root), segment_bytes=job["segment_bytes"], open_segments=4)
    client = Client(writer, job["prefix"], chance)
    kinds = [client.short, client.begin, client.go_on, client.abandon, client.delete]
    for step in chance.choices(kinds, weights=[8, 4, 8, 1, 1], k=30):
        step()
    writer.close()


def main() -> None:
    logging.disable(logging.WARNING)  # each start says what it mended
    batches("a", "none", 1)  # Arrow loads much at its first use
    for line in sys.stdin:
        job = json.loads(line)
        if not (process := os.fork()):
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
