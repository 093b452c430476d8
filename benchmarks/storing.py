"""Captured rows on their way to disk as a server sends them, without Ray in between."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from unittest import mock

from deployments.activations.catalogue import Catalogue
from deployments.activations.facts import RunFacts, ShardFacts, StoredRun
from deployments.activations.schema import to_batch
from deployments.activations.writer import Writer
from deployments.engine.request import Finished, Request

MODEL = "measured"


class Store:
    """The activation store's own writer on its own thread: Arrow files, each synced before it counts as stored.

    Rows are laid out on a further thread, as a replica does it off its event loop.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._writer = Writer(root, Catalogue())
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="layout")
        self._waiting: list[Future[Future[StoredRun]]] = []
        self._turn = 0

    def take(self, request: Request, event: Finished) -> None:
        """Send one request's rows to disk; returns at once."""
        # An engine that gives rows out in chunks would hand each one over here, as it comes.
        self._waiting.append(self._pool.submit(self._lay_out, request, event))

    def _lay_out(self, request: Request, event: Finished) -> Future[StoredRun]:
        assert event.captured is not None, event.error
        sequence = [*event.prompt, *event.tokens]
        session, positions = f"turn-{self._turn}", event.captured.positions
        modules = {point.name: point.module for point in request.points}
        batch = to_batch(
            ShardFacts(session, MODEL, None, MODEL, {}, modules),
            run_id=request.id,
            sample_id=None,
            positions=positions,
            token_ids=sequence[positions.start : positions.stop],
            prompt_tokens=len(event.prompt),
            points=event.captured.values,
        )
        return self._writer.submit(RunFacts(request.id, session, MODEL, 0.0, len(event.prompt), len(sequence)), [batch])

    def wait(self) -> int:
        """Wait until all that was taken is durable, and give its bytes."""
        size = sum(laid_out.result().result().bytes for laid_out in self._waiting)
        self._waiting.clear()
        return size

    def forget(self) -> None:
        """Delete what was stored, so that the next turn finds the disk as this one did."""
        self._writer.delete(f"turn-{self._turn}").result()
        self._turn += 1

    def close(self) -> None:
        """End both threads."""
        self._pool.shutdown()
        self._writer.close()


@contextlib.contextmanager
def store(directory: Path) -> Iterator[Store]:
    """A store in a new directory below `directory`, which is gone afterwards."""
    directory.mkdir(parents=True, exist_ok=True)
    root = Path(tempfile.mkdtemp(prefix="store-", dir=directory)).resolve()
    kept = Store(root)
    try:
        yield kept
    finally:
        kept.close()
        shutil.rmtree(root)


@contextlib.contextmanager
def slow_disk(bytes_per_second: float) -> Iterator[None]:
    """Make every write of this process take as long as a disk of that speed would."""
    write = os.write

    def slow(descriptor: int, data: bytes) -> int:
        time.sleep(len(data) / bytes_per_second)
        return write(descriptor, data)

    with mock.patch.object(os, "write", slow):
        yield
