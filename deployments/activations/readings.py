"""Downloads that the store is at: each is handed over piece by piece, at the pace of who takes them."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from deployments.activations.catalogue import Catalogue
from deployments.activations.encodings import ENCODERS, Encoded, as_arrow
from deployments.activations.facts import StoreError
from deployments.activations.named_tensors import tensors
from deployments.activations.objects import AnyRoot
from deployments.activations.reader import within
from deployments.activations.selecting import Wanted, select
from deployments.errors import RequestError

PIECE = 1 << 20  # bytes that are handed over at once
MOST = 32  # downloads at a time
IDLE_S = 600.0  # after which one that nobody takes from is given up


class Begun(NamedTuple):
    """A download: by what to ask for its pieces, and how many bytes they are."""

    key: str
    length: int


class _Reading:
    def __init__(self, session_id: str, run_id: str, encoded: Encoded) -> None:
        self.session_id = session_id
        self.run_id = run_id
        self.pieces = _of_a_size(encoded.pieces)
        self.left = encoded.length
        self.lock = threading.Lock()
        self.touched = time.monotonic()


class Readings:
    """Downloads of a store's runs. Safe to use from several threads."""

    def __init__(self, catalogue: Catalogue, root: AnyRoot) -> None:
        self._catalogue = catalogue
        self._root = root
        self._lock = threading.Lock()
        self._open: dict[str, _Reading] = {}

    def begin(
        self, session_id: str, runs: Sequence[str] | None, points: Sequence[str] | None, format: str
    ) -> Begun | None:
        """Plan a download of what a session holds now; None if there is no such session.

        Args:
            session_id: The session.
            runs: These runs alone. The tensors of several have names that begin with their run's.
            points: These points alone.
            format: `arrow`, or one of `ENCODERS`.

        Raises:
            RequestError: No such run or point, too many tensors for one file, or too many downloads at once.
            OSError: The disk refuses.
        """
        self._make_room()
        found = self._catalogue.entries(session_id, runs)
        if not found and not self._catalogue.knows(session_id):
            return None
        asked = [entry.facts.run_id for entry in found]
        known = asked if runs is None or set(runs) <= set(asked) else self._known(session_id)
        wanted = Wanted(session_id, set(asked), None if points is None else set(points))
        wanted._replace(runs=runs).check(known, {name for entry in found for name in entry.points})
        files = sorted({entry.uri for entry in found})
        paths = [within(self._root, uri) for uri in files]
        if runs is not None:
            first = [min(entry.offset for entry in found if entry.uri == uri) for uri in files]
            wanted = wanted._replace(offsets=dict(zip(paths, first, strict=True)))
        if format == "arrow":
            encoded = as_arrow(paths, wanted)
        else:
            encoded = ENCODERS[format](tensors(select(paths, wanted), prefixed=runs is None or len(runs) != 1))
        key = uuid.uuid4().hex
        with self._lock:
            self._open[key] = _Reading(session_id, asked[0], encoded)
        return Begun(key, encoded.length)

    def more(self, key: str) -> bytes:
        """The next piece; nothing at the end.

        Raises:
            StoreError: The download was given up, the session deleted, or a file is not what it was.
            OSError: The disk refuses.
        """
        with self._lock:
            reading = self._open.get(key)
        if reading is None:
            raise StoreError("Nothing was read for too long: begin the download again.")
        with reading.lock:
            reading.touched = time.monotonic()
            if not self._catalogue.holds(reading.session_id, reading.run_id):
                raise StoreError(f"Session {reading.session_id} was deleted while it was read.")
            piece = next(reading.pieces, b"")
            reading.left -= len(piece)
            if not piece and reading.left:
                raise StoreError(
                    f"Session {reading.session_id} ends {reading.left} bytes too early: its files changed."
                )
            return piece

    def end(self, key: str) -> None:
        """Forget a download; one that is not known is no error."""
        with self._lock:
            self._open.pop(key, None)

    def left(self) -> int:
        """Bytes that all downloads together have still to hand over."""
        with self._lock:
            return sum(reading.left for reading in self._open.values())

    def _known(self, session_id: str) -> list[str]:
        return [entry.facts.run_id for entry in self._catalogue.entries(session_id)]

    def _make_room(self) -> None:
        with self._lock:
            now = time.monotonic()
            self._open = {key: one for key, one in self._open.items() if now - one.touched < IDLE_S}
            if len(self._open) >= MOST:
                message = f"{MOST} downloads are going on; try again when one is done"
                raise RequestError(message, None, "server_busy", 429)


def _of_a_size(pieces: Iterator[bytes | memoryview]) -> Iterator[bytes]:
    """The same bytes in pieces of a size, but for the last."""
    held = bytearray()
    for piece in pieces:
        view = memoryview(piece).cast("B")
        while len(held) + len(view) >= PIECE:
            cut = PIECE - len(held)
            yield bytes(held) + bytes(view[:cut]) if held else bytes(view[:cut])
            held.clear()
            view = view[cut:]
        held += view
    if held:
        yield bytes(held)
