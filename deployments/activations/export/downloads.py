"""Downloads of stored runs, page by page: any range of what a session holds, as a file of some format."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
from xxhash import xxh3_128_hexdigest

from deployments import __version__
from deployments.activations.catalogue.catalogue import Catalogue
from deployments.activations.export.encodings import ENCODERS, as_arrow
from deployments.activations.export.named_tensors import tensors
from deployments.activations.export.selectors import IDLE_S, Choice, Found, changed, gone
from deployments.activations.facts import Entry, StoreError
from deployments.activations.files.bodies import Parts
from deployments.activations.files.places import DamagedError, File, Place
from deployments.activations.files.uris import file_at
from deployments.activations.reader.selection import Wanted, select

MOST_PLANS = 32
MOST_PARTS = 200_000  # of all plans together, each some hundred bytes; one plan alone may have more


@dataclass
class _Plan:
    tag: str
    parts: Parts
    version: tuple[int, ...]  # the catalogue's, of which the plan is
    touched: float = field(default_factory=time.monotonic)


class Readings:
    """Pages of a store's runs. Safe to use from several threads.

    How a download is made up is planned once and kept for a while; a plan counts for as long as the catalogue says the
    same of its runs. No page needs one: the next is planned again, with the same bytes.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        places: Sequence[Place] = (),
        restore: Callable[[Sequence[str]], bool] = lambda _: False,
    ) -> None:
        """Begin without plans.

        Args:
            catalogue: What there is.
            places: Where else segments are than on a disk of this machine.
            restore: Fetches segments that a place would rather have read from the disk, by their URIs; whether it did.
        """
        self._catalogue = catalogue
        self._places = places
        self._restore = restore
        self._lock = threading.Lock()
        self._plans: dict[tuple[Choice, int], _Plan] = {}  # by what they hold; those that were used last at the end

    def find(self, choice: Choice, tag: str | None = None) -> Found | None:
        """What a download would be; None if there is no such session.

        Args:
            choice: What of the session.
            tag: Of a download that was begun: runs that were added since are left out. By default all is what the
                session holds now.

        Raises:
            RequestError: There is no such run or point, or there are too many tensors for one file; 410, a file is
                gone.
            DamagedError: A file is damaged; names it.
            OSError: The disk refuses.
        """
        plan = self._plan(choice, _runs_of(tag))
        return None if plan is None else Found(plan.tag, plan.parts.length)

    def page(self, choice: Choice, tag: str, first: int, end: int) -> bytes:
        """The bytes from `first` to `end`, which lie within the length, of the download that has the tag.

        Raises:
            RequestError: 412, the session holds something else by now; 410, a file is gone.
            StoreError: A file is not what it was.
            DamagedError: The same; names the file.
            OSError: The disk refuses.
        """
        plan = self._plan(choice, _runs_of(tag))
        if plan is None or plan.tag != tag:
            raise changed()
        page = bytearray()
        try:
            for piece in plan.parts.read(first, end):
                page += piece
        except FileNotFoundError as error:
            if self._catalogue.version(choice.session_id) != plan.version:
                raise changed() from error
            raise gone(error.filename or error) from error
        if len(page) != end - first:
            raise StoreError(f"Session {choice.session_id} gives {len(page)} of {end - first} bytes: its files changed")
        return bytes(page)

    def sweep(self) -> None:
        """Drop plans that no page was asked of for long, and the least used ones of too many."""
        with self._lock:
            now = time.monotonic()
            self._plans = {choice: plan for choice, plan in self._plans.items() if now - plan.touched < IDLE_S}
            parts = sum(len(plan.parts) for plan in self._plans.values())
            for choice in list(self._plans)[:-1]:
                if len(self._plans) <= MOST_PLANS and parts <= MOST_PARTS:
                    break
                parts -= len(self._plans.pop(choice).parts)

    def _plan(self, choice: Choice, most: int | None) -> _Plan | None:
        """How a download is made up of the `most` runs that were added first; by default of all."""
        version = self._catalogue.version(choice.session_id)
        with self._lock:
            plan = self._plans.get((choice, most)) if most is not None else None
        if plan is None or plan.version != version:
            try:
                plan = self._planned(choice, most, version)
            except (FileNotFoundError, DamagedError) as error:
                if self._catalogue.version(choice.session_id) != version:
                    return self._plan(choice, most)  # some runs were deleted, or are elsewhere by now
                if isinstance(error, DamagedError):
                    raise
                raise gone(error.filename or error) from error
        if plan is None:
            return None
        plan.touched, plan.version = time.monotonic(), version
        with self._lock:
            key = choice, _runs_of(plan.tag) or 0
            self._plans.pop(key, None)
            self._plans[key] = plan
        self.sweep()
        return plan

    def _planned(self, choice: Choice, most: int | None, version: tuple[int, ...]) -> _Plan | None:
        """The plan that is there, where it still holds, or a new one."""
        places = self._catalogue.places(choice.session_id, choice.runs, most)
        away = sorted(uri for uri in {place[1] for place in places} if self._file(uri).folder.restores)
        if away and self._restore(away):
            places = self._catalogue.places(choice.session_id, choice.runs, most)
        tag = _tag(choice, places)
        with self._lock:
            plan = self._plans.get((choice, len(places)))
        if plan is not None and plan.tag == tag:
            return plan
        held = {place[0] for place in places}
        entries = [
            entry for entry in self._catalogue.entries(choice.session_id, choice.runs) if entry.facts.run_id in held
        ]
        if not entries and not self._catalogue.knows(choice.session_id):
            return None
        return _Plan(_tag(choice, sorted(map(_place, entries))), self._parts(choice, entries), version)

    def _parts(self, choice: Choice, entries: Sequence[Entry]) -> Parts:
        session_id, runs, points, format = choice
        asked = [entry.facts.run_id for entry in entries]
        known = asked if runs is None or set(runs) <= set(asked) else self._known(session_id)
        wanted = Wanted(session_id, set(asked), None if points is None else set(points))
        wanted._replace(runs=runs).check(known, {name for entry in entries for name in entry.points})
        files = sorted({entry.uri for entry in entries})
        paths = [self._file(uri) for uri in files]
        if runs is not None:
            first = [min(entry.offset for entry in entries if entry.uri == uri) for uri in files]
            wanted = wanted._replace(offsets=dict(zip(paths, first, strict=True)))
        left = set(asked)
        if format == "arrow":
            parts = as_arrow(paths, wanted, left)
        else:
            parts = ENCODERS[format](tensors(select(paths, wanted, left), prefixed=runs is None or len(runs) != 1))
        for entry in entries:
            if entry.facts.run_id in left:
                raise DamagedError(f"{self._file(entry.uri)}: the run {entry.facts.run_id} cannot be read there")
        return parts

    def _file(self, uri: str) -> File:
        return file_at(uri, self._places)

    def _known(self, session_id: str) -> list[str]:
        return [entry.facts.run_id for entry in self._catalogue.entries(session_id)]


def _place(entry: Entry) -> tuple[str, str, int, int]:
    return entry.facts.run_id, entry.uri, entry.offset, entry.bytes


def _tag(choice: Choice, places: Sequence[tuple[str, str, int, int]]) -> str:
    """The same for the same bytes: runs lie unchanged where they are, and versions may write them otherwise.

    It ends with the number of runs, so that the next page leaves out those that come later.
    """
    said = json.dumps([__version__, pa.__version__, choice, places])
    return f"{xxh3_128_hexdigest(said.encode())}-{len(places)}"


def _runs_of(tag: str | None) -> int | None:
    """How many runs a tag is of; None where it does not say."""
    _, _, runs = (tag or "").rpartition("-")
    return int(runs) if re.fullmatch("[0-9]{1,9}", runs) else None
