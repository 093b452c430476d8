"""Downloads of stored runs, as byte ranges of a file of the requested format."""

from __future__ import annotations

import json
import math
import mmap
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import torch
from xxhash import xxh3_128_hexdigest

from deployments import __version__
from deployments.activations.catalogue.queries import Queries
from deployments.activations.export.arrow_streams import Part, Parts, as_arrow
from deployments.activations.export.tensor_files import WRITERS, Member, Tensors, tensors
from deployments.activations.facts import Entry, StoreError
from deployments.activations.files.places import DamagedError, File, Place, file_at
from deployments.activations.filters import IDLE_S, Choice, DownloadInfo, download_changed, file_gone
from deployments.activations.reader.selection import Wanted, select
from deployments.errors import RequestError

MOST_PLANS = 32
MOST_PARTS = 200_000  # of all plans together, some hundred bytes each; one plan alone may have more


def _spilled(member: Member, folder: Path | None) -> Member:
    """The same, with its values in a map of a file that has no name."""

    def make() -> torch.Tensor:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.truncate(_size(member))
            kept = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=member.dtype).view(member.shape)
        return kept.copy_(member.make())

    return member._replace(make=make)


def _size(member: Member) -> int:
    return math.prod(member.shape) * member.dtype.itemsize


def _copy(found: Tensors, format: str, folder: Path | None) -> memoryview:
    """A file of named tensors, mapped, without a name; RequestError if it takes most of what is free on the disk."""
    size, free = sum(map(_size, found.members)), shutil.disk_usage(folder or tempfile.gettempdir()).free
    if 4 * size > free:  # float32 is twice as large as bfloat16, and pt is written twice
        message = f"{size} bytes of rows are too many for a copy, with {free} bytes free: name fewer, or take arrow"
        raise RequestError(message, "format", "download_too_large", 413)
    if format == "pt":  # torch.save takes all values at once, which may be more than memory holds
        found = found._replace(members=[_spilled(member, folder) for member in found.members])
    with tempfile.TemporaryFile(dir=folder) as file:
        WRITERS[format](found, file)
        file.flush()
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


class ArchivedError(Exception):
    """Segments, by their `uris`, are to be fetched from the bucket to the disk before they are read."""

    def __init__(self, uris: Sequence[str]) -> None:
        super().__init__(f"{len(uris)} segments are in the bucket alone")
        self.uris = uris


@dataclass
class _DownloadPlan:
    tag: str
    parts: Parts
    version: tuple[int, ...]  # of the session in the catalogue
    touched: float = field(default_factory=time.monotonic)


class Readings:
    """Serves ranges of downloads. Safe to use from several threads.

    A download is planned once, and its plan is valid while the catalogue lists the same runs at the same places; one
    that was dropped is made again, with the same bytes. Arrow streams are read out of the segments page by page; other
    formats are written as a whole to a file without a name in `folder`. Segments of a place that `restores` are to be
    fetched to the disk first: an ArchivedError names them, unless they are to be read `as_is`.
    """

    def __init__(self, catalogue: Queries, places: Sequence[Place] = (), folder: Path | None = None) -> None:
        self._catalogue, self._places, self._folder = catalogue, places, folder
        self._lock = threading.Lock()  # for changes of the next
        self._plans: dict[tuple[Choice, int | None], _DownloadPlan] = {}  # by choice and run count; the last used last

    def find(self, choice: Choice, tag: str | None = None, as_is: bool = False) -> DownloadInfo | None:
        """The tag and length of a download; None if there is no such session.

        `tag` is of a download that has begun: runs that were added since are left out. RequestError if there is no such
        run or point, or too many tensors for one file; 410 if a file is gone. DamagedError names a file.
        """
        plan = self._plan(choice, _runs_of(tag), as_is)
        return None if plan is None else DownloadInfo(plan.tag, plan.parts.length)

    def page(self, choice: Choice, tag: str, first: int, end: int, as_is: bool = False) -> bytes:
        """Bytes `first` to `end` of the download with this tag; RequestError 412 if it changed, 410 if gone."""
        plan = self._plan(choice, _runs_of(tag), as_is)
        if plan is None or plan.tag != tag:
            raise download_changed()
        page = bytearray()
        try:
            for piece in plan.parts.read(first, end):
                page += piece
        except FileNotFoundError as error:
            if self._catalogue.version(choice.session_id) != plan.version:
                raise download_changed() from error
            raise file_gone(error.filename or error) from error
        if len(page) != end - first:
            raise StoreError(f"Session {choice.session_id} gives {len(page)} of {end - first} bytes: its files changed")
        return bytes(page)

    def sweep(self) -> None:
        """Drop plans that were not used for long, and the least recently used of too many."""
        with self._lock:
            now = time.monotonic()
            self._plans = {choice: plan for choice, plan in self._plans.items() if now - plan.touched < IDLE_S}
            parts = sum(len(plan.parts) for plan in self._plans.values())
            for choice in list(self._plans)[:-1]:
                if len(self._plans) <= MOST_PLANS and parts <= MOST_PARTS:
                    break
                parts -= len(self._plans.pop(choice).parts)

    def _plan(self, choice: Choice, most: int | None, as_is: bool) -> _DownloadPlan | None:
        """The plan of a download of the `most` runs that were added first, by default of all."""
        version = self._catalogue.version(choice.session_id)
        plan = self._plans.get((choice, most))
        if plan is None or plan.version != version:
            try:
                plan = self._planned(choice, most, version, as_is)
            except (FileNotFoundError, DamagedError) as error:
                if self._catalogue.version(choice.session_id) != version:
                    return self._plan(choice, most, as_is)  # runs were deleted or have moved meanwhile
                if isinstance(error, DamagedError):
                    raise
                raise file_gone(error.filename or error) from error
        if plan is None:
            return None
        plan.touched, plan.version = time.monotonic(), version
        with self._lock:
            key = choice, _runs_of(plan.tag)
            self._plans.pop(key, None)
            self._plans[key] = plan
        self.sweep()
        return plan

    def _planned(self, choice: Choice, most: int | None, version: tuple[int, ...], as_is: bool) -> _DownloadPlan | None:
        """The cached plan, if it is still valid, or a new one."""
        places = self._catalogue.places(choice.session_id, choice.runs, most)
        away = sorted(uri for uri in {place[1] for place in places} if self._file(uri).folder.restores)
        if away and not as_is:
            raise ArchivedError(away)
        tag = _tag(choice, places)
        plan = self._plans.get((choice, len(places)))
        if plan is not None and plan.tag == tag:
            return plan
        listed = {place[0] for place in places}
        entries = self._catalogue.entries(choice.session_id, choice.runs)
        entries = [entry for entry in entries if entry.facts.run_id in listed]
        if not entries and not self._catalogue.knows(choice.session_id):
            return None
        tag = _tag(choice, sorted((entry.facts.run_id, entry.uri, entry.offset, entry.bytes) for entry in entries))
        return _DownloadPlan(tag, self._parts(choice, entries), version)

    def _parts(self, choice: Choice, entries: Sequence[Entry]) -> Parts:
        session_id, runs, points, format = choice
        left = {entry.facts.run_id for entry in entries}
        known = set(left)
        if runs is not None and not set(runs) <= known:
            known = {entry.facts.run_id for entry in self._catalogue.entries(session_id)}
        wanted = Wanted(session_id, set(left), None if points is None else set(points))
        wanted._replace(runs=runs).check(known, {name for entry in entries for name in entry.points})
        first = dict[str, int]()  # by file
        for entry in entries:
            first[entry.uri] = min(entry.offset, first.get(entry.uri, entry.offset))
        files = [self._file(uri) for uri in sorted(first)]
        if runs is not None:
            wanted = wanted._replace(offsets={file: first[uri] for uri, file in zip(sorted(first), files, strict=True)})
        if format == "arrow":
            parts = as_arrow(files, wanted, left)
        else:
            found = tensors(select(files, wanted, left), prefixed=runs is None or len(runs) != 1)
            parts = Parts([Part.known(_copy(found, format, self._folder))])
        if missing := next((entry for entry in entries if entry.facts.run_id in left), None):
            raise DamagedError(f"{self._file(missing.uri)}: the run {missing.facts.run_id} cannot be read there")
        return parts

    def _file(self, uri: str) -> File:
        return file_at(uri, self._places)


def _tag(choice: Choice, places: Sequence[tuple[str, str, int, int]]) -> str:
    """The same for the same bytes, as this version encodes them; it ends with the number of runs, for later pages."""
    content = json.dumps([__version__, pa.__version__, choice, places])
    return f"{xxh3_128_hexdigest(content.encode())}-{len(places)}"


def _runs_of(tag: str | None) -> int | None:
    """The number of runs in a tag; None where there is none."""
    _, _, runs = (tag or "").rpartition("-")
    return int(runs) if re.fullmatch("[0-9]{1,9}", runs) else None
