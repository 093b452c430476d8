"""Read stored activations back as torch tensors, from files that are sealed, still open or cut short."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import torch
from torch.utils.dlpack import from_dlpack

from deployments.activations import checksums
from deployments.activations.facts import PointType, RunFacts, ShardFacts
from deployments.activations.manifest import find_run, segments_in
from deployments.activations.messages import DamagedError as DamagedError
from deployments.activations.messages import check_batches, is_disks
from deployments.activations.messages import messages as messages
from deployments.activations.objects import AnyFile, ObjectFile, Place, place_of
from deployments.activations.schema import batch_facts, point_types, shard_facts, to_patterns, to_tensor
from deployments.points.names import COLUMNS, recorded
from deployments.points.patterns import Patterns


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
        text_offsets: Characters of prompt + generated text before each row's token, int32 `[rows]`; None if unknown.
        phases: Each row's phase, `"prompt"` or `"generated"`.
    """

    facts: RunFacts
    shard: ShardFacts
    positions: torch.Tensor
    token_ids: torch.Tensor
    text_offsets: torch.Tensor | None
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


class WholeRun(NamedTuple):
    """A run all of whose batches are in a file: its first row there, its size, its batches with rows in order.

    The size of the first run takes in the file's schema. `offset` is the place in the file where what
    is counted begins, a byte, or in an object the number of a batch. `sums` are the batches' checksums. `batch` is the
    number of the run's first batch, counted from where reading began. `intact` is whether `facts` are those that were
    written, as far as is known.
    """

    facts: RunFacts
    first_row: int
    bytes: int
    batches: list[pa.RecordBatch]
    sums: list[dict[str, str]]
    offset: int
    batch: int = 0
    intact: bool = True

    @property
    def rows(self) -> int:
        """Captured tokens."""
        return sum(batch.num_rows for batch in self.batches)


def load(
    source: str | os.PathLike[str],
    run_id: str | None = None,
    points: Sequence[str] | None = None,
    *,
    offset: int = 0,
    verify: bool = False,
    root: str | os.PathLike[str] | None = None,
) -> Run:
    """Load one run.

    Args:
        source: A `file://` URI or path of one file, or of a session's directory; or the id of a run.
        run_id: The run; may be left out where the source holds only one.
        points: The points to load, in this order, as `names.recorded` reads them: `layers.*.output`, `resid_post`,
            `layers.-1.output`. All of them where left out.
        offset: Where in a file the run begins, as lists of runs say it: nothing before it is looked at.
        verify: Whether to read all of it and compare checksums.
        root: Where to look for a run that is named by its id alone: the store's directory or URI, or the `http` address
            of a server. By default the variable `VITRINE_ACTIVATIONS`, or where a server of this machine stores.

    Raises:
        ValueError: If no one run is meant, or it has no such point; the message lists what there is. A DamagedError
            if values lie outside of the file, or are not those that were written; the message says which points are.
        FileNotFoundError: If the source does not exist.
    """
    from deployments.activations.locating import is_run_id, locate

    place: AnyFile | Place
    if is_run_id(source) and run_id in (None, source):
        run_id = str(source)
        place, offset = locate(run_id, root)
    else:
        place = path_of(source)
    path, offset = _holding(place, run_id, offset)
    matching = (run for run in _runs_in(path, offset) if run_id in (None, run.facts.run_id))
    found = next(matching, None)
    if found is None or (run_id is None and not offset and next(matching, None)):
        some = ", ".join(islice((run.facts.run_id for run in _runs_in(path)), 5))
        wanted = "one run" if run_id is None else f"run {run_id!r}"
        raise ValueError(f"{path} does not hold {wanted}; it holds {some or 'no whole run'}: name one as run_id")
    check_batches(path, found.batches)
    schema = found.batches[0].schema
    types = point_types(schema)
    shard = shard_facts(schema)
    try:
        names = list(types) if points is None else recorded(points, types, shard.layers)
    except ValueError as error:
        raise ValueError(f"Run {found.facts.run_id!r}: {error}") from error
    if isinstance(path, (ObjectFile, Place)):  # one request for all of a batch that is read
        columns = [name for name in schema.names if name in COLUMNS or name in names]
        found = found._replace(batches=[batch.select(columns) for batch in found.batches])
    if verify:
        _check(found, names)
    return Run(
        facts=found.facts,
        shard=shard,
        positions=_join([from_dlpack(batch["position"]) for batch in found.batches]),
        token_ids=_join([from_dlpack(batch["token_id"]) for batch in found.batches]),
        text_offsets=_offsets(found.batches),
        phases=[phase for batch in found.batches for phase in batch["phase"].to_pylist()],
        tensors={name: _values(name, types[name], found.batches) for name in names},
    )


def _check(run: WholeRun, points: Sequence[str]) -> None:
    wanted = {*COLUMNS, *points}
    bad = dict[str, None]()
    if not run.intact:
        raise DamagedError(f"run {run.facts.run_id}: what is said of it (its tags, for one) is not what was written")
    for batch, sums in zip(run.batches, run.sums, strict=True):
        rows = batch.select([name for name in batch.schema.names if name in wanted])
        try:
            bad |= dict.fromkeys(checksums.damaged(rows, {name: sums[name] for name in sums if name in wanted}))
        except pa.ArrowInvalid as error:
            raise DamagedError(f"run {run.facts.run_id}: {error}") from error
    if bad:
        good = [name for name in points if name not in bad]
        message = f"run {run.facts.run_id}: the values of {', '.join(bad)} are not those that were written"
        raise DamagedError(f"{message}; {', '.join(good) or 'none of the others'} can be read")


def runs(source: str | os.PathLike[str]) -> list[RunFacts]:
    """The whole runs of a file or directory (as for `load`), in the order of their requests and of their choices.

    Raises:
        FileNotFoundError: If the source does not exist.
    """
    found = (run.facts for run in _runs_in(path_of(source)))
    return sorted(found, key=lambda facts: facts.created)


def whole_run(source: str | os.PathLike[str] | AnyFile, run_id: str, offset: int = 0) -> WholeRun | None:
    """One whole run of a file or directory (as for `load`); no tensor is read. None if it is not there.

    Raises:
        FileNotFoundError: If the source does not exist.
    """
    path, offset = _holding(path_of(source), run_id, offset)
    return next((run for run in _runs_in(path, offset) if run.facts.run_id == run_id), None)


def whole_runs(path: AnyFile, offset: int = 0) -> Iterator[WholeRun]:
    """The whole runs of one file; no tensor is read. A run without its end, or short of batches, is left out.

    Args:
        path: The file.
        offset: Where a run begins, as `WholeRun` says it; those before it are left out, and rows count from there.

    Raises:
        OSError: The disk or the store refuses.
        DamagedError: A batch of an object cannot be read.
    """
    rows = first_row = seen = first_batch = 0
    start = offset
    run_id, batches, sums = "", list[pa.RecordBatch](), list[dict[str, str]]()
    for number, message in enumerate(messages(path, offset)):
        try:
            facts = batch_facts(message.metadata)
            own = checksums.read(message.metadata, message.batch.schema.names)
        except ValueError:
            return  # none of ours: nothing behind it counts
        if facts.number == 0:
            run_id, first_row, batches, sums, seen, first_batch = facts.run_id, rows, [], [], 0, number
        seen += 1
        rows += message.batch.num_rows
        if message.batch.num_rows:
            batches.append(message.batch)
            sums.append(own)
        if facts.run and facts.run_id == run_id and facts.number + 1 == facts.batches == seen:
            size, intact = _size(path, message.end - start), checksums.is_of_run(message.metadata or {})
            yield WholeRun(facts.run, first_row, size, batches, sums, start, first_batch, intact)
            start = message.end


def _size(path: AnyFile, between: int) -> int:
    """Bytes between two places of a file; of an object, as if its batches were all as large."""
    if isinstance(path, Path):
        return between
    return path.size * between // int(path.reader().num_record_batches)


def is_sealed(path: AnyFile) -> bool:
    """Whether the file has its footer.

    Raises:
        OSError: It cannot be read.
    """
    try:
        footer(path)
    except pa.ArrowException:
        return False
    except OSError as error:
        if is_disks(error):
            raise
        return False
    return True


def footer(path: AnyFile) -> Any:
    """Arrow's reader by a file's footer.

    Raises:
        pa.ArrowInvalid: It has none.
        OSError: It cannot be read.
    """
    return path.reader() if isinstance(path, ObjectFile) else pa.ipc.open_file(pa.OSFile(str(path)))


def size_of(path: AnyFile) -> int:
    """A file's bytes.

    Raises:
        OSError: It cannot be read.
    """
    return path.size if isinstance(path, ObjectFile) else path.stat().st_size


def path_of(source: str | os.PathLike[str] | ObjectFile | Place) -> AnyFile | Place:
    """The file or directory that a path or URI means; what is in object storage already as it is.

    A URI of object storage is a file's if it ends in `.arrow`.

    Raises:
        ValueError: It is a `file://` URI of another machine, or no URI of a file system.
    """
    if isinstance(source, (ObjectFile, Place)):
        return source
    text = os.fspath(source)
    if "://" not in text:
        return Path(text).expanduser()
    url = urlsplit(text)
    if url.scheme != "file":
        place = place_of(text)
        return ObjectFile(*place) if place.path.endswith(".arrow") else place
    if url.netloc not in ("", "localhost"):
        raise ValueError(f"{text!r} is not a file:// URI of this machine")
    return Path(unquote(url.path))


def within(bucket: Place | None, uri: str) -> AnyFile:
    """A store's file, by the URI that it is named by to others, which says neither keys nor settings.

    Args:
        bucket: Where the store archives to.
        uri: The file's, on the disk or in the bucket.
    """
    if bucket and uri.startswith(f"{bucket.uri}/"):
        return bucket.file(unquote(uri.removeprefix(f"{bucket.uri}/")))
    return Path(unquote(urlsplit(uri).path))


def files_in(path: AnyFile | Place) -> list[AnyFile]:
    """The Arrow files of a directory, by their names, or the one file that is meant; links in it are not followed."""
    if isinstance(path, Place):
        return [*segments_in(path)]
    if isinstance(path, Path) and path.is_dir():
        return [*sorted(item for item in path.glob("*.arrow") if item.is_file() and not item.is_symlink())]
    return [path]


def _holding(path: AnyFile | Place, run_id: str | None, offset: int) -> tuple[AnyFile | Place, int]:
    """Where to look for a run of a bucket: its manifest says. Before, small objects went up in others beside them."""
    if isinstance(path, ObjectFile) and run_id is not None and not path.exists():
        path, offset = path.folder, 0
    if isinstance(path, Place) and run_id is not None and not offset:
        return find_run(path, run_id) or (path, 0)
    return path, offset


def _runs_in(path: AnyFile | Place, offset: int = 0) -> Iterator[WholeRun]:
    files = files_in(path)
    if offset and files != [path]:
        raise ValueError(f"offset is a place in one file, and {path} is a directory")
    for file in files:
        yield from whole_runs(file, offset)


def _values(name: str, kind: PointType, batches: Sequence[pa.RecordBatch]) -> torch.Tensor | Patterns:
    if None not in kind.shape:
        return _join([to_tensor(batch[name], kind.dtype) for batch in batches])
    return Patterns.joined([to_patterns(batch[name], kind, batch["position"][0].as_py()) for batch in batches])


def _offsets(batches: Sequence[pa.RecordBatch]) -> torch.Tensor | None:
    columns = [batch["text_offset"] for batch in batches if "text_offset" in batch.schema.names]
    if len(columns) < len(batches) or any(column.null_count for column in columns):
        return None
    return _join([from_dlpack(column) for column in columns])


def _join(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
