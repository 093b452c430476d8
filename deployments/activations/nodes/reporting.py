"""Reports of a node's writer to the store: which runs it has stored, in batches, repeated until the store has them."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple

import ray

from deployments.activations.facts import Note, name_of
from deployments.activations.state.nodes import Deletion, Node, uri_of

if TYPE_CHECKING:  # the ingress imports this module too, and needs no Arrow
    from deployments.activations.catalogue.catalogue import Catalogue

BATCH = 50  # runs in one call; Ray passes so few without its object store
GATHER_S = 0.2  # wait for more runs before a report
BEAT_S = 2.0  # between two calls with nothing to report
PAUSE_S = (0.5, 10.0)  # between two attempts: the first pause, and the longest
_ANSWER_S = 20.0  # time limit of a call to the store

logger = logging.getLogger(__name__)


class Reply(NamedTuple):
    """What the store answers to a node, with another `life` each time that it has started.

    `refused` sessions may get no more runs. Where the node joins, `known` says of each of its files, by URI, how many
    bytes it had and behind which byte the next run to report begins.
    """

    life: str
    refused: dict[str, str]
    deletions: list[Deletion]
    known: dict[str, tuple[int, int]] | None = None


class RunReporter:
    """Reports a node's runs to the store, on its own thread. While the store does not answer, it tries again.

    Args:
        store: The store's actor.
        node: Its key is empty if the node writes into the store's directory.
        catalogue: The node's, from which runs are reported in the order of their files.
        delete: Deletes a session; returns whether it is gone.
        beat: Called after each round, at least every `BEAT_S` seconds while the store answers.

    Attributes:
        refused: Sessions that may get no more runs, with the reason.
    """

    def __init__(
        self,
        store: Any,
        node: Node,
        catalogue: Catalogue,
        delete: Callable[[Deletion], bool],
        beat: Callable[[], None],
    ) -> None:
        self.refused: dict[str, str] = {}
        self._store, self._node, self._catalogue = store, node, catalogue
        self._delete, self._beat = delete, beat
        self._lock = threading.Lock()  # for the next two
        self._news, self._flushes = dict[str, None](), list[Future[None]]()  # files with something to report
        self._next_run: dict[str, int] = {}  # by file, the byte from which on its runs are not reported
        self._done: list[int] = []  # ids of deletions that are done and not reported yet
        self._life: str | None = None  # of the store that knows the node
        self._hurry, self._wake = threading.Event(), threading.Event()
        self._joined, self._began = threading.Event(), time.monotonic()
        self._ended = False
        catalogue.on_added = self._added
        self._thread = threading.Thread(target=self._loop, name="activation-reporter", daemon=True)
        self._thread.start()

    def flush(self) -> Future[None]:
        """Report at once; done when the store has all runs and its deletions are done, or when it does not answer."""
        future = Future[None]()
        with self._lock:
            self._flushes.append(future)
        self._hurry.set()
        self._wake.set()
        return future

    async def joined(self, seconds: float) -> None:
        """Return once the node has joined the store, or that many seconds after this object was made."""
        left = self._began + seconds - time.monotonic()
        if not self._joined.is_set() and left > 0:
            await asyncio.to_thread(self._joined.wait, left)

    def close(self) -> None:
        """End the thread; the next join reports what is missing."""
        self._ended = True
        self.flush()
        self._thread.join()

    def _added(self, notes: Iterable[Note]) -> None:
        with self._lock:
            self._news |= dict.fromkeys(note.file.uri for note in notes)
        self._wake.set()

    def _loop(self) -> None:
        pause = PAUSE_S[0]
        while not self._ended:
            self._hurry.clear()
            with self._lock:
                flushes, self._flushes = self._flushes, []
            failed = True
            try:
                self._report()
                self._beat()
                failed, pause = False, PAUSE_S[0]
            except Exception as error:  # after any error, the next round reports again: no stored run may stay unlisted
                is_away = isinstance(error, (ray.exceptions.RayActorError, TimeoutError))
                if self._life is not None or not is_away:
                    logger.warning(
                        "stored runs are reported to the activation store later: %s", error, exc_info=not is_away
                    )
                self._life = None
            for future in flushes:
                future.set_result(None)
            if failed:
                self._hurry.wait(pause)
                pause = min(2 * pause, PAUSE_S[1])
            else:
                self._wake.wait(BEAT_S)
                self._hurry.wait(GATHER_S)
                self._wake.clear()

    def _report(self) -> None:
        while not self._ended:
            if self._life is None:
                self._join()
            notes = self._next()
            uris = [reported_uri(self._node, note.file.uri) for note in notes]
            told = [note._replace(file=note.file._replace(uri=uri)) for note, uri in zip(notes, uris, strict=True)]
            reply = self._call(self._store.report, self._node.key, told, self._done, list(self.refused))
            self._done = []
            self._reported(notes)
            if reply.life != self._life:
                self._life = None
            self._take(reply)
            if self._life is not None and not self._news and not self._done:
                return

    def _join(self) -> None:
        """Do the store's deletions first; all that it does not have is news."""
        reply = self._call(self._store.join, self._node)
        self._take(reply)
        known = reply.known or {}
        for uri, now in self._catalogue.files_of("file:").items():
            has = known.get(reported_uri(self._node, uri), (0, 0))
            self._next_run[uri] = has[1]
            if has != now:
                with self._lock:
                    self._news[uri] = None
        self._life = reply.life
        self._joined.set()

    def _take(self, reply: Reply) -> None:
        self.refused = reply.refused
        for deletion in reply.deletions:
            if deletion.id not in self._done:
                if not self._delete(deletion):  # the store knows nothing of the session's runs that stay or came since
                    self._life = None
                self._done.append(deletion.id)

    def _next(self) -> list[Note]:
        """The next runs to report, with their files; after any error, a new join finds them again."""
        notes, left = list[Note](), BATCH
        while left > 0:
            with self._lock:
                if (uri := next(iter(self._news), None)) is None:
                    break
                del self._news[uri]
            if (note := self._catalogue.of_file(uri, self._next_run.get(uri, 0), left)) is None:
                continue  # it was deleted since
            if len(note.entries) == left:  # perhaps there are more: for the store it is sealed with its last run
                note = note._replace(file=note.file._replace(sealed=False, modified_ns=None))
                with self._lock:
                    self._news[uri] = None
            notes.append(note)
            left -= max(1, len(note.entries))
        return notes

    def _reported(self, notes: Iterable[Note]) -> None:
        """The store has these; it alone lists sealed files of its own directory."""
        for _, entries, file in notes:
            if entries:
                self._next_run[file.uri] = entries[-1].offset + 1
            if file.sealed:
                self._next_run.pop(file.uri, None)
                if not self._node.key:
                    self._catalogue.forget_files(file.uri)

    def _call(self, method: Any, *args: Any) -> Reply:
        return method.remote(*args).future().result(timeout=_ANSWER_S)  # type: ignore[no-any-return]


def reported_uri(node: Node, uri: str) -> str:
    """A segment's URI as the store lists it; relative to the node's directory if the node has its own."""
    return uri_of(node.key, name_of(uri)) if node.key else uri
