"""Small objects of a session become one: object storage cannot append, so each commit made one of its own.

What is to become one is written down first, in an object `.joined-<name>` that names the small ones. They go when the
large one has been there for a while, so that who reads them can finish; a run's URI leads to the large one then.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import groupby
from typing import NamedTuple
from urllib.parse import unquote

import pyarrow as pa

from deployments.activations.checksums import damaged
from deployments.activations.entries import Entry, StoredFile
from deployments.activations.facts import RunFacts
from deployments.activations.object_shard import ObjectShard
from deployments.activations.objects import ObjectFile, Place
from deployments.activations.reader import DamagedError, whole_runs

SMALL = 16 << 20  # bytes: larger objects are left as they are
MANY = 32  # small objects of one kind, from which on they become one
LARGE = 64 << 20  # bytes of small objects that become one, at the most; they are in memory meanwhile
READERS_S = 3600.0  # that readers of the small ones have to finish
JOINED = ".joined-"  # no session id begins with '.'

logger = logging.getLogger(__name__)


class Joined(NamedTuple):
    """What became one: the runs as they are now, their file, and the URIs of the files that they were in."""

    session_id: str
    entries: list[Entry]
    file: StoredFile
    before: list[str]


def join(root: Place, session_id: str, small: Sequence[str]) -> Iterator[Joined]:
    """Write small objects of a session together, as many at once as have one schema; they are still there afterwards.

    Args:
        root: The store's.
        session_id: The session; nothing deletes it meanwhile.
        small: The names of its small objects.

    Raises:
        OSError: The store refuses; what was written counts only if it is whole.
        DamagedError: Values of a small object changed; then it stays as it is, and with it those beside it.
    """
    folder = root.below(session_id)
    files = sorted((folder.file(name) for name in small), key=_kind)
    for _, kind in groupby(files, key=_kind):
        for some in _of_a_size(list(kind)):
            if len(some) >= MANY:
                yield _join(root, session_id, some)


def compact(root: Place, small: Mapping[str, Sequence[str]]) -> Iterator[Joined]:
    """Join small objects, but for those that were joined before.

    Args:
        root: The store's.
        small: By session, the URIs of its small objects.

    Raises:
        OSError: The store refuses.
        DamagedError: As for `join`.
    """
    before = swept(root) if small else set()
    for session_id, uris in small.items():
        names = [unquote(uri.rpartition("/")[2]) for uri in uris]
        left = [name for name in names if (session_id, name) not in before]
        if len(left) >= MANY:
            yield from join(root, session_id, left)


def sweep(root: Place, now: float | None = None) -> bool:
    """Remove small objects that have become one, once their readers had time; false where there were none.

    Args:
        root: The store's.
        now: Unix seconds.

    Raises:
        OSError: The store refuses.
    """
    now, removed = time.time() if now is None else now, False
    for info in root.infos():
        if not info.base_name.startswith(JOINED):
            continue
        mark = root.file(info.base_name)
        said = json.loads(mark.read())
        folder = root.below(said["session"])
        if not folder.file(said["name"]).exists():
            if now - info.mtime.timestamp() > READERS_S:
                mark.remove()  # a crash came between, or the session is deleted: the small ones are all there are
        elif now - info.mtime.timestamp() > READERS_S:
            for name in said["small"]:
                folder.file(name).remove()
            mark.remove()
            removed = True
    return removed


def swept(root: Place) -> set[tuple[str, str]]:
    """Session and name of each small object that has become one, and is to go.

    Raises:
        OSError: The store refuses.
    """
    marks = [json.loads(root.file(i.base_name).read()) for i in root.infos() if i.base_name.startswith(JOINED)]
    whole = [said for said in marks if root.below(said["session"]).file(said["name"]).exists()]
    return {(said["session"], name) for said in whole for name in said["small"]}


def _kind(file: ObjectFile) -> str:
    schema = file.reader().schema
    return f"{schema.to_string(show_field_metadata=False)}{schema.metadata}"


def _of_a_size(files: Sequence[ObjectFile]) -> Iterator[list[ObjectFile]]:
    some, size = list[ObjectFile](), 0
    for file in files:
        if some and size + file.size > LARGE:
            yield some
            some, size = [], 0
        some.append(file)
        size += file.size
    yield some


def _join(root: Place, session_id: str, small: Sequence[ObjectFile]) -> Joined:
    name = f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(4)}-000001.arrow"
    mark = root.file(f"{JOINED}{session_id}-{name}")
    mark.write(json.dumps({"session": session_id, "name": name, "small": [file.name for file in small]}).encode())
    schema: pa.Schema = small[0].reader().schema
    shard = ObjectShard(root.below(session_id).file(name), session_id, schema)
    entries = list[Entry]()
    try:
        for file in small:
            entries += [shard.finish(facts, batches) for facts, batches in _whole(file)]
        shard.begin_sync()
        shard.sync()
        shard.end_sync()
    except BaseException:
        shard.close()
        raise
    logger.info("%d objects of session %s became one, %s", len(small), session_id, name)
    return Joined(session_id, entries, shard.facts(), [file.uri for file in small])


def _whole(file: ObjectFile) -> Iterator[tuple[RunFacts, list[pa.RecordBatch]]]:
    """The runs of a file, with all their columns."""
    for run in whole_runs(file):
        batches = [batch.select(batch.schema.names) for batch in run.batches]
        for batch, sums in zip(batches, run.sums, strict=True):
            if bad := damaged(batch, sums):
                raise DamagedError(f"{file}, run {run.facts.run_id}: {', '.join(bad)} are not as they were written")
        yield run.facts, batches
