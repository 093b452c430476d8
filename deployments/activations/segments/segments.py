"""The complete runs of one segment, and whether it is sealed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import pyarrow as pa

from deployments.activations.facts import Entry, PointType, RunFacts
from deployments.activations.files.places import DamagedError, File
from deployments.activations.segments import checksums
from deployments.activations.segments.batches import AnyFile, Batch, as_file, batches_of
from deployments.activations.segments.schema import batch_facts, point_types


class WholeRun(NamedTuple):
    """A run all of whose batches are in a segment."""

    facts: RunFacts
    first_row: int  # the number of its first row in the segment
    bytes: int  # its size there; that of the first run includes the schema
    batches: list[Batch]  # those that have rows, in order
    sums: list[dict[str, str]]  # the batches' checksums
    types: Mapping[str, PointType]  # the selected points, by default all
    file: File
    offset: int  # the byte where it begins
    intact: bool  # whether `facts` match their checksum, if they have one

    @property
    def rows(self) -> int:
        """Captured tokens."""
        return sum(batch.num_rows for batch in self.batches)

    def entry(self, uri: str) -> Entry:
        """The same as the catalogue lists it, of the file that has this URI there."""
        return Entry(self.facts, uri, self.first_row, self.rows, self.bytes, self.types, self.offset)


def whole_runs(source: AnyFile, offset: int = 0) -> Iterator[WholeRun]:
    """The whole runs of a segment from byte `offset` on; rows count from there. DamagedError names another's file."""
    file = as_file(source)
    rows = first_row = seen = 0
    start = offset
    run_id, batches, sums = "", list[Batch](), list[dict[str, str]]()
    types: Mapping[str, PointType] | None = None  # all runs of a segment have the same points
    for batch in batches_of(file, offset):
        try:
            facts = batch_facts(batch.metadata)
            own = checksums.read(batch.metadata, batch.schema.names)
        except ValueError:
            return  # another program's: nothing after it counts
        if facts.number == 0:
            run_id, first_row, batches, sums, seen = facts.run_id, rows, [], [], 0
        seen += 1
        rows += batch.num_rows
        if batch.num_rows:
            batches.append(batch)
            sums.append(own)
        if facts.run and facts.run_id == run_id and facts.number + 1 == facts.batches == seen and batches:
            try:
                types = point_types(batch.schema) if types is None else types
            except ValueError as error:
                raise DamagedError(f"{file}: {error}") from error
            size, intact = batch.end - start, checksums.is_of_run(batch.metadata)
            yield WholeRun(facts.run, first_row, size, batches, sums, types, file, start, intact)
            start = batch.end


def is_sealed(source: AnyFile) -> bool:
    """Whether a segment has its footer."""
    try:
        footer(source)
    except pa.ArrowException:
        return False
    except OSError as error:
        if error.errno is not None:  # the disk's: Arrow raises OSError for files that are cut off, too
            raise
        return False
    return True


def footer(source: AnyFile) -> Any:
    """Open a segment by its footer, as Arrow's file reader; pa.ArrowInvalid if it has none."""
    return pa.ipc.open_file(as_file(source).input())
