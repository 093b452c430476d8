"""A client that stores runs by reference until it is killed: `killed_client.py ADDRESS ROOT PREFIX NOTES`.

It notes what it begins and which answers it gets in a file, durably, in the lines of killed_writer.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
from typing import Any

import ray

from deployments.activations.actors.store import connect
from tests.deployments.activations.killed_writer import SESSIONS, batches, made


async def store(actor: Any, notes: int, session: str, run_id: str, parts: int) -> None:
    """One run in as many parts."""

    def note(what: str) -> None:
        os.write(notes, f"{what} {session} {run_id}\n".encode())
        os.fsync(notes)

    pieces = batches(session, run_id, parts)
    for part, piece in enumerate(pieces[:-1]):
        await actor.append.remote(session, run_id, part, [ray.put(piece)])
    note("begin")
    await actor.write.remote(made(session, run_id)[0], [ray.put(pieces[-1])], len(pieces) - 1)
    note("stored")


async def main(address: str, root: str, prefix: str, path: str) -> None:
    ray.init(address, namespace="vitrine", log_to_driver=False)
    actor = connect(root)
    await actor.place.remote()
    notes = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for turn in itertools.count():
        runs = [(session, f"{prefix}-{turn}-{parts}", parts) for session in SESSIONS for parts in (1, 3)]
        await asyncio.gather(*(store(actor, notes, *run) for run in runs))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
