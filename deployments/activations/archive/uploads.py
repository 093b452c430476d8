"""Uploads of segments, which go on beside all else that the archive's thread does."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from deployments.activations.facts import name_of
from deployments.activations.state.nodes import node_of

UPLOADS = 8  # segments of one node that are uploaded at a time
QUEUED = 8 * UPLOADS  # of one node, that are begun or wait for a thread, so that no thread waits for the next look
PAUSES_S = (1.0, 300.0)  # before what failed is tried again: at first, doubled each time, and at the most


class Pauses:
    """Which names have failed and are not to be tried again yet. Safe to use from several threads."""

    def __init__(self) -> None:
        self._begun: dict[str, tuple[float, float, str]] = {}  # until when, how long the next one is, and why

    def __len__(self) -> int:
        return len(self._begun)

    def __contains__(self, name: str) -> bool:
        return self._begun.get(name, (0.0, 0.0, ""))[0] > time.monotonic()

    @property
    def why(self) -> str | None:
        """The reason of the last failure that no success has followed."""
        return next((why for *_, why in reversed(list(self._begun.values()))), None)

    def begin(self, name: str, why: BaseException) -> None:
        """It has failed, perhaps again."""
        _, pause, _ = self._begun.pop(name, (0.0, PAUSES_S[0], ""))
        self._begun[name] = time.monotonic() + pause, min(2 * pause, PAUSES_S[1]), str(why)

    def end(self, name: str) -> None:
        """It has succeeded."""
        self._begun.pop(name, None)

    def clear(self) -> None:
        """Everything may be tried again."""
        self._begun.clear()


class Uploads:
    """Uploads by the URIs of their segments, until they are forgotten. For one thread; any may ask for `whole`.

    `upload` is called with a segment's URI and bytes, on a thread of its own; `wake` on that thread each time one ends.
    `pauses` gets the names of segments whose upload failed.
    """

    def __init__(self, upload: Callable[[str, int], None], wake: Callable[[], None], pauses: Pauses) -> None:
        self._upload, self._wake, self._pauses = upload, wake, pauses
        self._begun: dict[str, Future[None]] = {}
        self._queued = Counter[str | None]()  # how many of these are of each node
        self._pools = defaultdict[str | None, ThreadPoolExecutor](  # by node: one that is slow holds up no other
            lambda: ThreadPoolExecutor(UPLOADS, thread_name_prefix="archive")
        )

    def begin(self, segments: Iterable[tuple[str, int]]) -> None:
        """Begin uploads of segments, by URI and bytes, as far as there is room for them in the queue."""
        for uri, size in segments:
            node = node_of(uri)
            if uri not in self._begun and name_of(uri) not in self._pauses and self._queued[node] < QUEUED:
                self._queued[node] += 1
                self._begun[uri] = self._pools[node].submit(self._upload, uri, size)
                self._begun[uri].add_done_callback(lambda _: self._wake())

    def failed(self) -> list[tuple[str, BaseException]]:
        """Forget the uploads that have failed, and return why; each is begun no more until its pause is over."""
        ended = [(uri, one.exception()) for uri, one in self._begun.items() if one.done()]
        failed = [(uri, error) for uri, error in ended if error]
        for uri, error in failed:
            self._end(uri)
            self._pauses.begin(name_of(uri), error)
        return failed

    @property
    def begun(self) -> list[str]:
        """The segments that are not forgotten."""
        return list(self._begun)

    def whole(self) -> list[str]:
        """The segments whose objects are complete."""
        return [uri for uri, one in list(self._begun.items()) if one.done() and not one.exception()]

    def forget(self, uris: Iterable[str]) -> None:
        """The manifest lists these, or nobody needs them any more."""
        for uri in uris:
            self._end(uri)
            self._pauses.end(name_of(uri))

    def close(self) -> None:
        """Wait for all that are begun."""
        for pool in self._pools.values():
            pool.shutdown()

    def _end(self, uri: str) -> None:
        if self._begun.pop(uri, None):
            self._queued[node_of(uri)] -= 1
