"""Read stored activations back as torch tensors, from files that are sealed, still open or cut short."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import torch
from torch.utils.dlpack import from_dlpack

from deployments.activations.facts import PointType, RunFacts, ShardFacts
from deployments.activations.patterns import Patterns
from deployments.activations.schema import batch_facts, point_types, shard_facts, to_patterns, to_tensor

# An Arrow IPC file is this, padded to 8 bytes, a stream, and a footer once it is sealed.
_MAGIC = b"ARROW1\0\0"
_COPIED = 1 << 16  # reads below this many bytes, and so what Arrow says of a batch, are no views of the map


@dataclass(frozen=True, eq=False, repr=False)
class Run(Mapping[str, Any]):
    """One stored run: point name to tensor `[rows, ...features]`, one row per captured token.

    Attention patterns come as `Patterns`: a sequence of tensors `[heads, tokens seen]`, one for each captured token.
    Tensors of a run of one batch lie over a private map of the file if they are large; others are copies.
    Writing to them is allowed and never reaches the file.

    Attributes:
        facts: What the run is.
        shard: What it shares with the other runs of its file.
        positions: Each row's index in prompt + generated, int32 `[rows]`.
        token_ids: Each row's token, int32 `[rows]`.
        phases: Each row's phase, `"prompt"` or `"generated"`.
    """

    facts: RunFacts
    shard: ShardFacts
    positions: torch.Tensor
    token_ids: torch.Tensor
    phases: list[str]
    tensors: dict[str, torch.Tensor | Patterns]

    def __getitem__(self, point: str) -> Any:
        return self.tensors[point]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __repr__(self) -> str:
        return f"Run({self.facts.run_id!r}, rows={len(self.positions)}, points={list(self.tensors)})"


class Message(NamedTuple):
    """A record batch of a file, its own metadata, and the byte behind it."""

    batch: pa.RecordBatch
    metadata: Mapping[bytes, bytes] | None
    end: int


class WholeRun(NamedTuple):
    """A run all of whose batches are in a file: its first row there, its size, its batches with rows in order.

    The size of the first run takes in the file's schema; `offset` is the byte of the file where what is counted begins.
    """

    facts: RunFacts
    first_row: int
    bytes: int
    batches: list[pa.RecordBatch]
    offset: int


def load(
    source: str | os.PathLike[str], run_id: str | None = None, points: Sequence[str] | None = None, offset: int = 0
) -> Run:
    """Load one run.

    Args:
        source: A `file://` URI or path of one file, or of a session's directory.
        run_id: The run; may be left out where the source holds only one.
        points: The points to load, in this order; all of them where left out.
        offset: The byte of a file at which the run begins, as lists of runs say it: nothing before it is looked at.

    Raises:
        ValueError: If no one run is meant, or it has no such point; the message lists what there is.
        FileNotFoundError: If the source does not exist.
    """
    path = path_of(source)
    matching = (run for run in _runs_in(path, offset) if run_id in (None, run.facts.run_id))
    found = next(matching, None)
    if found is None or (run_id is None and not offset and next(matching, None)):
        some = ", ".join(islice((run.facts.run_id for run in _runs_in(path)), 5))
        wanted = "one run" if run_id is None else f"run {run_id!r}"
        raise ValueError(f"{path} does not hold {wanted}; it holds {some or 'no whole run'}: name one as run_id")
    schema = found.batches[0].schema
    types = point_types(schema)
    if unknown := [name for name in points or () if name not in types]:
        raise ValueError(f"Run {found.facts.run_id!r} has no {', '.join(unknown)}; it has {', '.join(types)}")
    names = types if points is None else points
    return Run(
        facts=found.facts,
        shard=shard_facts(schema),
        positions=_join([from_dlpack(batch["position"]) for batch in found.batches]),
        token_ids=_join([from_dlpack(batch["token_id"]) for batch in found.batches]),
        phases=[phase for batch in found.batches for phase in batch["phase"].to_pylist()],
        tensors={name: _values(name, types[name], found.batches) for name in names},
    )


def runs(source: str | os.PathLike[str]) -> list[RunFacts]:
    """The whole runs of a file or directory (as for `load`), in the order in which they were written.

    Raises:
        FileNotFoundError: If the source does not exist.
    """
    return [run.facts for run in _runs_in(path_of(source))]


def whole_run(source: str | os.PathLike[str], run_id: str, offset: int = 0) -> WholeRun | None:
    """One whole run of a file or directory (as for `load`); no tensor is read. None if it is not there.

    Raises:
        FileNotFoundError: If the source does not exist.
    """
    return next((run for run in _runs_in(path_of(source), offset) if run.facts.run_id == run_id), None)


def whole_runs(path: Path, offset: int = 0) -> Iterator[WholeRun]:
    """The whole runs of one file; no tensor is read. A run without its end, or short of batches, is left out.

    Args:
        path: The file.
        offset: The byte at which a run begins; those before it are left out, and rows count from there.
    """
    rows = first_row = seen = 0
    start = offset
    run_id, batches = "", list[pa.RecordBatch]()
    for message in messages(path, offset):
        try:
            facts = batch_facts(message.metadata)
        except ValueError:
            return  # none of ours: nothing behind it counts
        if facts.number == 0:
            run_id, first_row, batches, seen = facts.run_id, rows, [], 0
        seen += 1
        rows += message.batch.num_rows
        if message.batch.num_rows:
            batches.append(message.batch)
        if facts.run and facts.run_id == run_id and facts.number + 1 == facts.batches == seen:
            yield WholeRun(facts.run, first_row, message.end - start, batches, start)
            start = message.end


def messages(path: Path, offset: int = 0) -> Iterator[Message]:
    """The record batches of one file up to where it ends or is cut off, those before a byte left out.

    No tensor is read.
    """
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            return
        stream = _Stream(file)
        try:
            reader = pa.ipc.open_stream(stream)
            if offset:
                reader.read_next_batch()  # with it come the dictionaries
                stream.position = offset
            while True:
                batch, metadata = reader.read_next_batch_with_custom_metadata()
                yield Message(batch, metadata, stream.position)
        except StopIteration:
            return
        except (pa.ArrowException, ValueError, OSError):
            return  # a message that the end of the file cuts off: nothing behind it counts


def is_sealed(path: Path) -> bool:
    """Whether the file has its footer."""
    try:
        pa.ipc.open_file(pa.OSFile(str(path)))
    except (pa.ArrowInvalid, OSError):
        return False
    return True


def path_of(source: str | os.PathLike[str]) -> Path:
    """The path that a path or a `file://` URI of this machine means.

    Raises:
        ValueError: It is another kind of URI.
    """
    text = os.fspath(source)
    if "://" not in text:
        return Path(text)
    url = urlsplit(text)
    if url.scheme != "file" or url.netloc not in ("", "localhost"):
        raise ValueError(f"{text!r} is not a file:// URI of this machine")
    return Path(unquote(url.path))


def _runs_in(path: Path, offset: int = 0) -> Iterator[WholeRun]:
    if offset and path.is_dir():
        raise ValueError(f"offset is a byte of one file, and {path} is a directory")
    files = sorted(path.glob("*.arrow")) if path.is_dir() else [path]
    for file in files:
        yield from whole_runs(file, offset)


class _Stream:
    """What Arrow reads a file's stream from: tensors are views of a map, what describes them is copied.

    The map is private and copies on write: torch cannot keep a caller from writing to a tensor, and on a
    read-only map that would end the process. So would touching a page of it that the file no longer has. A writer
    cuts runs off that will not be finished: until a run is known to be whole, it is read without the map.
    """

    closed = False

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._map = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
        self.position = len(_MAGIC)

    def read(self, size: int) -> memoryview:
        data = self._map[self.position : self.position + size]
        if len(data) < _COPIED:
            copy = bytearray(len(data))
            data = memoryview(copy)[: os.preadv(self._file.fileno(), [copy], self.position)]
        self.position += len(data)
        return data

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        """The file is closed by whoever opened it."""


def _values(name: str, kind: PointType, batches: Sequence[pa.RecordBatch]) -> torch.Tensor | Patterns:
    if None not in kind.shape:
        return _join([to_tensor(batch[name], kind.dtype) for batch in batches])
    return Patterns.joined([to_patterns(batch[name], kind, batch["position"][0].as_py()) for batch in batches])


def _join(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
