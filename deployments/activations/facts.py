"""Facts about stored activations, and errors of the store. Imports neither torch nor Arrow."""

from __future__ import annotations

import errno
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

Format = Literal["pt", "safetensors", "npz", "parquet", "hf"]  # of exports
NO_OWNER = "_"  # the directory of sessions without an owner; no owner's name is that
_SESSION_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")


logger = logging.getLogger(__name__)


class StoreError(Exception):
    """Activations could not be stored or deleted; the message has the reason and what to do."""


_ADVICE = {
    errno.ENOSPC: "free space on the disk, or delete sessions",
    errno.EDQUOT: "free space under the quota, or delete sessions",
    errno.EFBIG: "raise the limit on file sizes, or make segments smaller",
    errno.EACCES: "give the server's user write permission there",
    errno.EPERM: "give the server's user write permission there",
    errno.EROFS: "remount the file system for writing",
    errno.ENOENT: "put the directory back, or mount it again",
    errno.ENOTDIR: "remove the file that is in the place of the session's directory",
    errno.ELOOP: "remove the link that is in the place of the session's directory",
    errno.ENOLCK: "mount the file system with locks, or choose a file system that has them",
    errno.ENOSYS: "mount the file system with locks, or choose a file system that has them",
    errno.EOPNOTSUPP: "mount the file system with locks, or choose a file system that has them",
    errno.EMFILE: "raise the limit on open files",
}


def explain(root: object, error: Exception) -> StoreError:
    """The StoreError for an error below `root`, with what to do. Only the log has paths: clients read the message."""
    logger.error("%s: %s", root, error)
    advice = _ADVICE.get(
        getattr(error, "errno", None) or 0, "check that it can be reached and written, then send the request again"
    )
    reason = getattr(error, "strerror", None) or error
    return StoreError(f"The activation store failed ({reason}): {advice}.")


@contextmanager
def explained(root: object) -> Iterator[None]:
    """While open, an OSError below `root` is raised as the StoreError of `explain`."""
    try:
        yield
    except OSError as error:
        raise explain(root, error) from error


@dataclass(frozen=True)
class FileInfo:
    """What all runs of one file share."""

    session_id: str
    model: str
    revision: str | None  # where one was asked for
    architecture: str  # the model's class in transformers
    versions: dict[str, str]  # of libraries, by name
    modules: dict[str, str]  # for each point the model's own module path with `.input` or `.output`
    layers: int | None = None  # of the model
    adapter: str | None = None  # that is merged into the weights
    adapter_revision: str | None = None
    dtype: str | None = None  # of its weights; of the others, where some are quantized
    quantization: dict[str, Any] | None = None  # the checkpoint's `method`, and whether its weights were `dequantized`


class SessionName(NamedTuple):
    """A session: its owner, None where it has none, and its id, which is unique among the owner's."""

    owner: str | None
    id: str

    @property
    def folder(self) -> str:
        """Its directory below the store's, `<owner>/<id>`."""
        return f"{self.owner or NO_OWNER}/{self.id}"

    @classmethod
    def of_folder(cls, folder: str) -> SessionName:
        """The inverse of `folder`."""
        owner, _, id = folder.partition("/")
        return cls(None if owner == NO_OWNER else owner, id)


@dataclass(frozen=True)
class RunInfo:
    """What one run is."""

    run_id: str  # unique within the session
    session_id: str
    model: str
    # When the request came, in Unix seconds, plus the choice's index in microseconds: runs sort by it as they were
    # asked for.
    created: float
    prompt_tokens: int
    tokens: int  # of prompt and generation together
    owner: str | None = None  # of the key that sent the request; None on a server without keys
    sample_id: str | None = None  # the user's name for the sample
    tags: dict[str, str] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)  # the request's sampling fields
    finish_reason: str | None = None
    request_id: str | None = None
    messages_hash: str | None = None  # of the request's messages
    interventions: list[dict[str, Any]] = field(default_factory=list)  # as they were sent
    logit_lens: dict[str, Any] | None = None  # as it was sent
    # Prompt and generated text, special tokens included, if the request asked to keep it: what the rows' `text_offset`
    # counts characters of.
    text: str | None = None
    batch_invariant: bool = False  # bits independent of other sequences, on the same machine and versions

    @property
    def session(self) -> SessionName:
        """The session that it belongs to."""
        return SessionName(self.owner, self.session_id)

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> RunInfo:
        """The facts that `as_json` wrote, without unknown fields."""
        return cls(**{name: facts[name] for name in RUN_FACTS if name in facts})

    @cached_property
    def as_json(self) -> str:
        """All of it, as it is stored; TypeError if it holds what JSON cannot."""
        return json.dumps({name: getattr(self, name) for name in RUN_FACTS})


RUN_FACTS = [item.name for item in fields(RunInfo)]


class PointType(NamedTuple):
    """Shape of one token's value at a point, None for an axis that grows, and its torch dtype's name."""

    shape: tuple[int | None, ...]
    dtype: str


class StoredPoint(NamedTuple):
    """Where one point of a run lies: rows `first_row` to `first_row + shape[0]` of the file `uri`."""

    uri: str
    first_row: int
    shape: tuple[int | None, ...]
    dtype: str


class RunEnd(NamedTuple):
    """A run's last rows, and all that is known of it."""

    run: RunInfo
    batches: list[Any]  # record batches, or references to them
    part: int = 0  # the number of parts sent before


class RunLocation(NamedTuple):
    """Where a stored run's points lie, for whoever sent it; `bytes` is its size in its file."""

    run_id: str
    points: dict[str, StoredPoint]
    bytes: int


class RunName(NamedTuple):
    """The name of a run, unique in a store."""

    session: SessionName
    run_id: str


class StoredFile(NamedTuple):
    """A file of whole runs by its path below the store's directory; `modified_ns` is None where it may still change."""

    path: str
    bytes: int
    sealed: bool
    rows: int
    modified_ns: int | None


class RunRecord(NamedTuple):
    """One stored run; interventions, logit lens and text are only in its file."""

    facts: RunInfo
    path: str  # of its file, below the store's directory
    first_row: int
    rows: int
    bytes: int
    points: Mapping[str, PointType]  # shared by all runs of the file
    offset: int  # the byte where it begins in the file, 0 for the first run
    uri: str = ""  # of its file: on the disk, or in the bucket where the disk has it no more
    archived: bool = False  # whether the file is in the bucket

    def location(self) -> RunLocation:
        """Where each of the run's points lies."""
        points = {
            name: StoredPoint(self.uri, self.first_row, (self.rows, *point.shape), point.dtype)
            for name, point in self.points.items()
        }
        return RunLocation(self.facts.run_id, points, self.bytes)


class FileUpdate(NamedTuple):
    """Runs of one file that are durable, and the file as it is now."""

    session: SessionName
    entries: Sequence[RunRecord]
    file: StoredFile


def names_a_session(name: str) -> bool:
    """Whether a directory's name can be a session's."""
    return bool(_SESSION_ID.fullmatch(name))


def public_uri(uri: str) -> str:
    """A URI without settings and a slash at its end; a path as it is."""
    return urlsplit(uri)._replace(query="").geturl().rstrip("/") if "://" in uri else uri


def check_session_id(value: str) -> str:
    """Return `value` if it may name a session; else ValueError names `session_id`."""
    if not names_a_session(value):
        raise ValueError(
            f"session_id {value[:140]!r} must be 1 to 128 letters, digits, '.', '_' or '-', and must not begin with '.'"
        )
    return value
