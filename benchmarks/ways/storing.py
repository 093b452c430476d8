"""Recorded rows on their way from the engine to disk as a replica sends them, without Ray."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deployments.activations.facts import RunFacts, SegmentFacts, SessionName
from deployments.activations.index.index import Index
from deployments.activations.segments.columns import to_batch
from deployments.activations.writer.writer import Writer
from deployments.engine.capture.captured import Captured
from deployments.engine.engine import Engine
from deployments.engine.request import Event, Finished, Request, Rows

MODEL = "measured"


@dataclass
class _Run:
    request: Request
    session: str
    parts: int = 0
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # first come, first served: rows stay in order


class Store:
    """The activation store's own writer on its own thread: Arrow files, synced before a run counts as stored.

    An event loop on a further thread takes what the engine hands out, and lays it out on a third.
    """

    def __init__(self, root: Path) -> None:
        self._writer = Writer(root, Index.scanned(root))
        self._layout = ThreadPoolExecutor(max_workers=1, thread_name_prefix="layout")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="store", daemon=True)
        self._thread.start()
        self._runs: dict[str, _Run] = {}
        self._sent: list[Future[None]] = []
        self._turn = 0
        self.bytes = 0  # stored so far

    def expect(self, request: Request) -> None:
        """Announce a request's rows."""
        self._runs[request.id] = _Run(request, f"turn-{self._turn}")

    def take(self, engine: Engine, event: Event) -> None:
        """Send a request's rows to disk, and report to the engine when they are there; return at once."""
        if isinstance(event, Rows | Finished) and event.id in self._runs:
            sending = self._send(engine, event, self._runs[event.id])
            self._sent.append(asyncio.run_coroutine_threadsafe(sending, self._loop))
        if isinstance(event, Finished):
            self._runs.pop(event.id, None)

    async def _send(self, engine: Engine, event: Rows | Finished, run: _Run) -> None:
        captured = event.captured
        assert captured is not None
        async with run.turn:
            batches = []
            if captured.positions:
                batches.append(await self._loop.run_in_executor(self._layout, _lay_out, run, captured))
            if isinstance(event, Finished):
                tokens = len(event.prompt) + len(event.tokens)
                facts = RunFacts(event.id, run.session, MODEL, 0.0, len(event.prompt), tokens)
                stored = await asyncio.wrap_future(self._writer.submit(facts, batches, run.parts))
                self.bytes += stored.bytes
            else:
                await asyncio.wrap_future(
                    self._writer.append(SessionName(None, run.session), event.id, run.parts, batches)
                )
                run.parts += 1
        engine.written(event.id, captured.bytes)

    def wait(self) -> None:
        """Wait until all that was taken is durable."""
        for sent in self._sent:
            sent.result()
        self._sent.clear()

    def forget(self) -> None:
        """Delete what was stored, so that the next turn finds the disk as this one did."""
        self._writer.delete(SessionName(None, f"turn-{self._turn}")).result()
        self._turn += 1

    def close(self) -> None:
        """End all threads."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._layout.shutdown()
        self._writer.close()


def _lay_out(run: _Run, captured: Captured) -> Any:
    request = run.request
    return to_batch(
        SegmentFacts(run.session, MODEL, None, MODEL, {}, {point.name: point.module for point in request.points}),
        run_id=request.id,
        sample_id=None,
        positions=captured.positions,
        token_ids=captured.token_ids,
        prompt_tokens=len(request.prompt),
        points=captured.values,
    )


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
