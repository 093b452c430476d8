"""Reports of a node's writer to the store: which runs it has stored, in batches, repeated until the store has them."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import ray

from deployments.activations.facts import FileUpdate
from deployments.activations.state.nodes import Deletion, Node

BATCH = 50  # runs in one call; Ray passes so few without its object store
GATHER_S = 0.2  # wait for more runs before a report
BEAT_S = 2.0  # between two calls with nothing to report
PAUSE_S = (0.5, 10.0)  # between two attempts: the first pause, and the longest
MOST = 10_000  # notes that wait for the store; more are made again of the node's files
_ANSWER_S = 20.0  # time limit of a call to the store

logger = logging.getLogger(__name__)


class Reply(NamedTuple):
    """What the store answers to a node, with another `life` each time that it has started.

    `refused` sessions may get no more runs. Where the node joins, `known` are bytes and runs of its files by name, and
    `releases` says whether Ray's autoscaler can release it.
    """

    life: str
    refused: dict[str, str]
    deletions: list[Deletion]
    known: dict[str, tuple[int, int]] | None = None
    releases: bool = False


class RunReporter:
    """Reports a node's runs to the store, on its own thread. While the store does not answer, it tries again.

    Args:
        store: The store's actor.
        node: Its key is empty if the node writes into the store's directory.
        stored: Gives the node's files and runs, without files of which the store has the same size and run count.
        delete: Deletes a session; returns whether it is gone.
        on_reported: Called with the notes that the store has now.
        beat: Called after each round, at least every `BEAT_S` seconds while the store answers.

    Attributes:
        refused: Sessions that may get no more runs, with the reason.
        releases: Whether Ray's autoscaler can release the node, once it has joined the store.
    """

    def __init__(
        self,
        store: Any,
        node: Node,
        stored: Callable[[Mapping[str, tuple[int, int]]], Iterable[FileUpdate]],
        delete: Callable[[Deletion], bool],
        on_reported: Callable[[list[FileUpdate]], None],
        beat: Callable[[], None],
    ) -> None:
        self.refused: dict[str, str] = {}
        self.releases = False
        self._store, self._node = store, node
        self._stored, self._delete, self._on_reported, self._beat = stored, delete, on_reported, beat
        self._turn, self._lock = threading.Lock(), threading.Lock()  # one reports at a time; for the next two
        self._notes = deque[FileUpdate]()
        self._missed = False  # whether there were too many notes, so that the node has to join again
        self._backlog: Iterator[FileUpdate] = iter(())  # what the node has since before it joined
        self._held: FileUpdate | None = None  # the first one of what is left, if any was, when notes were last sent
        self._done: list[int] = []  # ids of deletions that are done and not reported yet
        self._life: str | None = None  # of the store that knows the node
        self._news, self._ended = threading.Event(), threading.Event()
        self._joined, self._began = threading.Event(), time.monotonic()
        self._thread = threading.Thread(target=self._loop, name="activation-reporter", daemon=True)
        self._thread.start()

    def add(self, notes: Iterable[FileUpdate]) -> None:
        """Report these within a second."""
        with self._lock:
            self._notes.extend(part for note in notes for part in _parts(note))
            if len(self._notes) > MOST:
                self._notes.clear()
                self._missed = True
        self._news.set()

    def flush(self) -> bool:
        """Report at once; whether the store has all notes now and its deletions are done, or does not answer."""
        with self._turn:
            try:
                self._report()
                self._beat()
                return True
            except Exception as error:  # after any error, the next round reports again: no stored run may stay unlisted
                is_away = isinstance(error, (ray.exceptions.RayActorError, TimeoutError))
                if self._life is not None or not is_away:
                    logger.warning(
                        "stored runs are reported to the activation store later: %s", error, exc_info=not is_away
                    )
                self._life = None
                return False

    async def joined(self, seconds: float) -> None:
        """Return once the node has joined the store, or that many seconds after this object was made."""
        left = self._began + seconds - time.monotonic()
        if not self._joined.is_set() and left > 0:
            await asyncio.to_thread(self._joined.wait, left)

    def close(self) -> None:
        """End the thread; the next join reports what is missing."""
        self._ended.set()
        self._news.set()
        self._thread.join()

    def _loop(self) -> None:
        pause, longest = PAUSE_S
        while not self._ended.is_set():
            if self.flush():
                pause = PAUSE_S[0]
                self._news.wait(BEAT_S)
                self._ended.wait(GATHER_S)
                self._news.clear()
            else:
                self._ended.wait(pause)
                pause = min(2 * pause, longest)

    def _report(self) -> None:
        while not self._ended.is_set():
            if self._life is None or self._missed:
                self._join()
            notes = self._next()
            reply = self._call(self._store.report, self._node.key, notes, self._done, list(self.refused))
            self._done = []
            self._on_reported(notes)
            if reply.life != self._life:
                self._life = None
            self._take(reply)
            if self._life is not None and not (self._held or self._notes or self._missed or self._done):
                return

    def _join(self) -> None:
        """Do the store's deletions first, then report everything that it does not have."""
        reply = self._call(self._store.join, self._node)
        self._take(reply)
        with self._lock:
            self._notes.clear()  # `_stored` reports everything that is stored by now
            self._missed, self._held = False, None
        self._backlog = (part for note in self._stored(reply.known or {}) for part in _parts(note))
        self._life, self.releases = reply.life, reply.releases
        self._joined.set()

    def _take(self, reply: Reply) -> None:
        self.refused = reply.refused
        for deletion in reply.deletions:
            if deletion.id in self._done:
                continue
            is_deleted = self._delete(deletion)
            self._done.append(deletion.id)
            with self._lock:
                kept = [note for note in self._notes if note.session_id != deletion.session_id]
                if not is_deleted or self._held or len(kept) < len(self._notes):
                    self._life = None  # a new join reports runs that came since
                self._notes = deque(kept)

    def _next(self) -> list[FileUpdate]:
        """The next notes; where they do not arrive, a new join reports their runs."""
        notes, runs = list[FileUpdate](), 0
        while note := self._first():
            runs += max(1, len(note.entries))
            if notes and runs > BATCH:
                break
            notes.append(note)
        self._held = note
        return notes

    def _first(self) -> FileUpdate | None:
        """The first note; those of the backlog come before later ones of the same files."""
        if note := self._held or next(self._backlog, None):
            self._held = None
            return note
        with self._lock:
            return self._notes.popleft() if self._notes else None

    def _call(self, method: Any, *args: Any) -> Reply:
        return method.remote(*args).future().result(timeout=_ANSWER_S)  # type: ignore[no-any-return]


def _parts(note: FileUpdate) -> Iterable[FileUpdate]:
    last = max(0, len(note.entries) - 1) // BATCH * BATCH
    for first in range(0, last + 1, BATCH):
        is_last = first == last  # a file is sealed for the store once it knows all its runs
        file = note.file if is_last else note.file._replace(sealed=False, modified_ns=None)
        some = note.entries[first : first + BATCH]  # without what the file alone has of a run
        bare = [one._replace(facts=replace(one.facts, interventions=[], text=None)) for one in some]
        yield note._replace(entries=bare, file=file)
