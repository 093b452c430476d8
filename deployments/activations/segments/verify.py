"""Verifies stored files, and finds what can still be read of damaged ones."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc

from deployments.activations.files.places import DamagedError, DiskFile, File
from deployments.activations.segments import checksums
from deployments.activations.segments.batches import AnyFile, as_file, batches_of
from deployments.activations.segments.checksums import BATCH, KEY, LAYOUT, RUN
from deployments.activations.segments.schema import BatchFacts, batch_facts
from deployments.activations.segments.segment_writer import VERSION, ComparingWriter
from deployments.activations.segments.segments import footer, is_sealed, whole_runs

State = Literal["whole", "open", "cut short", "damaged", "unreadable"]
_CHUNK = 1 << 20
_KEYS = {"run_id", "batch", "run", "batches", KEY, LAYOUT, RUN, BATCH}


@dataclass
class Verified:
    """What a look at every byte of a file found."""

    # `whole` with its footer; `open` without it, every run whole; `cut short` within a run; `damaged` where values
    # changed, batches that the footer lists do not read, or nothing is ours; `unreadable` where the disk refuses.
    state: State = "whole"
    reason: str = ""  # what is wrong, in words
    runs: int = 0  # whole ones, of which no value changed
    rows: int = 0  # of these
    unfinished: dict[str, int] = field(default_factory=dict)  # rows of whole batches by the run that has no end
    # By whole run, what is not as it was written: columns by their names, whose others can be read; `facts`, what the
    # run is; `layout`, lengths and nulls; `metadata`, of a batch or the file's schema.
    damaged: dict[str, list[str]] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether every run of the file is whole."""
        return self.state in ("whole", "open")


def verify(source: AnyFile) -> Verified:
    """Read every byte and every batch of a file, and compare checksums; one that is elsewhere is fetched for that.

    Checksums cover values, and metadata as it lies in the file: they are the same for every version of pyarrow. The
    bytes between, which none covers, are compared where the footer names the pyarrow that runs; under another, damage
    to these alone is not seen.
    """
    found = Verified()
    try:
        with _on_disk(as_file(source)) as file:
            read_all(file.local)  # first, since a page that the disk cannot give would end who maps the file
            _look_through(found, file)
    except OSError as error:
        found.state, found.reason = "unreadable", error.strerror or str(error)
    return found


@contextmanager
def _on_disk(file: File) -> Iterator[DiskFile]:
    """A file, or a copy of one that is elsewhere."""
    if file.local is not None:
        yield DiskFile(file.local)
        return
    with tempfile.TemporaryDirectory(prefix="vitrine-segment-") as folder:
        copy = Path(folder, file.name)
        file.fetch(copy)
        yield DiskFile(copy)


def _changed(batch: pa.RecordBatch, metadata: Mapping[bytes, bytes], facts: BatchFacts, schema: bytes) -> list[str]:
    """What of a batch is not as it was written: columns by their names, `facts`, `layout` or `metadata`."""
    words = {"run_id": facts.run_id} | ({"sample_id": facts.run.sample_id} if facts.run else {})
    bad = [name for name, word in words.items() if not _all_are(batch[name], word)]
    bad += checksums.damaged(batch, checksums.read(metadata, batch.schema.names))
    said = {key.decode(): value.decode() for key, value in metadata.items()}
    described = [] if checksums.is_of_run(metadata) else ["facts"]
    if LAYOUT in said and said[LAYOUT] != checksums.layout(batch):
        described.append("layout")
    if said.keys() & {BATCH, LAYOUT}:
        is_same = said.get(BATCH) == checksums.of_batch(schema, said)
    else:  # files that were cut out of others have none; an unknown name is a damaged one
        is_same = said.keys() <= _KEYS
    return bad + (described or ([] if is_same else ["metadata"]))


def _all_are(column: pa.Array, word: str | None) -> bool:
    if word is None:
        return bool(column.null_count == len(column))
    return column.null_count == 0 and pc.all(pc.equal(column, word)).as_py() is not False


def _schema_of(path: Path) -> bytes:
    """The message of a file's schema, as it lies there."""
    with path.open("rb") as file:
        file.seek(8)  # after the magic, which is padded
        head = file.read(8)
        return head + file.read(int.from_bytes(head[4:], "little"))


def _is_written_alike(path: Path) -> bool:
    """Whether Arrow would write a sealed file with the same bytes; true if its footer names another version of Arrow.

    That covers what no checksum does: padding, how batches are framed, and the footer.
    """
    given = footer(path).metadata or {}
    said = {key.decode(errors="replace"): value.decode(errors="replace") for key, value in given.items()}
    if said and said.get(BATCH) != checksums.of_batch(b"", said):
        return False
    if said and said[VERSION] != pa.__version__:
        return True
    with path.open("rb") as file:
        sink, writer = ComparingWriter(file, path.stat().st_size), None
        for batch in batches_of(path):
            writer = writer or pa.ipc.new_file(sink, batch.schema, metadata=given or None)
            writer.write_batch(batch.select(), custom_metadata=batch.metadata)
        if writer:
            writer.close()
        return sink.same and not file.read(1)


def read_all(path: Path) -> None:
    """Read every byte of a file; OSError if the disk cannot give one."""
    with path.open("rb", buffering=0) as file:
        while file.read(_CHUNK):
            pass


def _look_through(found: Verified, file: DiskFile) -> None:
    rows_of, batches, end, is_summed = dict[str, int](), 0, 0, True  # whether all have this version's checksums
    try:
        schema = _schema_of(file.local)
        for batch in batches_of(file):
            end, facts = batch.end, batch_facts(batch.metadata)
            rows = batch.select()
            if bad := _changed(rows, batch.metadata, facts, schema):
                known = found.damaged.setdefault(facts.run_id, [])
                known += [name for name in bad if name not in known]
            is_summed = is_summed and BATCH.encode() in batch.metadata
            rows_of[facts.run_id] = rows_of.get(facts.run_id, 0) + rows.num_rows
            batches += 1
    except (ValueError, KeyError) as error:  # also Arrow's, and a DamagedError; of two columns of one name
        found.state, found.reason = "damaged", f"batch {batches}: {error}"
    with contextlib.suppress(DamagedError):  # found before
        for whole in whole_runs(file):
            count = rows_of.pop(whole.facts.run_id, 0)
            if whole.facts.run_id not in found.damaged:
                found.runs += 1
                found.rows += count
    found.unfinished = rows_of
    found.damaged = {run: names for run, names in found.damaged.items() if run not in rows_of}
    if found.damaged and found.state == "whole":
        found.state = "damaged"
        found.reason = "; ".join(f"of {run} changed {', '.join(names)}" for run, names in found.damaged.items())
    if found.state != "damaged":
        found.state, found.reason = _state(file, batches, end, bool(rows_of), is_summed)


def _state(file: DiskFile, batches: int, end: int, is_cut: bool, is_summed: bool) -> tuple[State, str]:
    """The state of a file all of whose batches, the last one up to byte `end`, are as they were written, and why."""
    if is_sealed(file):
        if batches < (listed := footer(file).num_record_batches):
            return "damaged", f"batch {batches} of {listed} and all after it cannot be read"
        if not is_cut and is_summed and not _is_written_alike(file.local):
            return "damaged", "bytes outside the values (padding, framing, footer) have changed; all runs can be read"
    elif not batches:
        return "damaged", "no batch of an activation file can be read"
    elif end != file.size:
        return "cut short", f"the last {file.size - end} bytes are not a complete batch"
    if is_cut:
        return "cut short", "a run has no end"
    return ("whole" if is_sealed(file) else "open"), ""
