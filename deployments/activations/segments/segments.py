"""The complete runs of one file, and whether it is sealed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from deployments.activations.facts import PointType, RunInfo, RunRecord
from deployments.activations.segments.batches import Batch, DamagedError, batches_of
from deployments.activations.segments.checksums import is_intact
from deployments.activations.segments.schema import batch_info, point_types


class WholeRun(NamedTuple):
    """A run all of whose batches are in a file."""

    facts: RunInfo
    first_row: int  # the number of its first row in the file
    bytes: int  # its size there; that of the first run includes the schema
    batches: list[Batch]  # in order; the last one, which says what the run is, may have no rows
    types: Mapping[str, PointType]  # the selected points, by default all
    path: Path
    offset: int  # the byte where it begins

    @property
    def rows(self) -> int:
        """Captured tokens."""
        return sum(batch.num_rows for batch in self.batches)

    def entry(self, path: str, uri: str = "") -> RunRecord:
        """The same as an index lists it, with the path of its file below the store's directory, and its URI."""
        return RunRecord(self.facts, path, self.first_row, self.rows, self.bytes, self.types, self.offset, uri)

    def damage(self) -> list[str]:
        """Read all values, and name the batches that are not as they were written; DamagedError as by `select`."""
        count = len(self.batches)
        return [
            f"batch {number} of {count}"
            for number, batch in enumerate(self.batches)
            if not is_intact(batch.select(), batch.metadata)
        ]


def whole_runs(path: str | os.PathLike[str], offset: int = 0) -> Iterator[WholeRun]:
    """The whole runs of a file from byte `offset` on; rows count from there. DamagedError if another program wrote it.

    OSError if it cannot be read.
    """
    path, start, rows, first_row, run_id = Path(path), offset, 0, 0, ""
    batches, types = list[Batch](), None  # all runs of a file have the same points
    for batch in batches_of(path, offset):
        try:
            facts = batch_info(batch.metadata)
        except ValueError:
            return  # another program's: nothing after it counts
        if facts.number == 0:
            run_id, first_row, batches = facts.run_id, rows, []
        rows += batch.num_rows
        batches.append(batch)
        is_last = facts.run and facts.run_id == run_id and facts.number + 1 == facts.batches == len(batches)
        if facts.run and is_last and batches[0].num_rows:
            try:
                types = types or point_types(batch.schema)
            except ValueError as error:
                raise DamagedError(f"{path}: {error}") from error
            yield WholeRun(facts.run, first_row, batch.end - start, batches, types, path, start)
            start, batches = batch.end, []


def is_sealed(path: str | os.PathLike[str]) -> bool:
    """Whether a file has its footer."""
    return listed_batches(path) is not None


def listed_batches(path: str | os.PathLike[str]) -> int | None:
    """How many batches a file's footer lists; None if it has none. OSError if the disk refuses."""
    try:
        with pa.OSFile(os.fspath(path)) as file:
            return int(pa.ipc.open_file(file).num_record_batches)
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # the disk's: Arrow raises it for files cut off, too
            raise
        return None
