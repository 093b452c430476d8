"""Whether stored files are whole, and what can still be read of those that are not."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc

from deployments.activations import checksums
from deployments.activations.messages import DamagedError, messages
from deployments.activations.objects import AnyFile
from deployments.activations.reader import footer, is_sealed, size_of, whole_runs
from deployments.activations.schema import BatchFacts, batch_facts

State = Literal["whole", "open", "cut short", "damaged", "unreadable"]
_CHUNK = 1 << 20


@dataclass
class Verified:
    """What a look at every byte of a file found.

    Attributes:
        path: The file.
        state: `whole` with its footer; `open` without it, every run whole (of a server that still writes, or was killed
            and has not started again); `cut short` within a run; `damaged` where values changed, batches that the
            footer lists do not read, or there is nothing of ours; `unreadable` where the disk refuses.
        reason: What is wrong, in words; empty where nothing is.
        runs: Whole runs, of which no value changed.
        rows: Their rows.
        unfinished: Rows of whole batches by the run that has no end.
        damaged: By whole run, its columns whose values are not those that were written; its others can be read.
    """

    path: AnyFile
    state: State = "whole"
    reason: str = ""
    runs: int = 0
    rows: int = 0
    unfinished: dict[str, int] = field(default_factory=dict)
    damaged: dict[str, list[str]] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether every run of the file is whole."""
        return self.state in ("whole", "open")


def verify(path: AnyFile) -> Verified:
    """Read every byte and every batch of a file, and compare checksums."""
    found = Verified(path)
    try:
        if isinstance(path, Path):
            read_all(path)  # first, since a page that the disk cannot give would end who maps the file
        _look_through(found)
    except OSError as error:
        found.state, found.reason = "unreadable", error.strerror or str(error)
    return found


def changed(batch: pa.RecordBatch, facts: BatchFacts, sums: Mapping[str, str]) -> list[str]:
    """The columns of a batch that are not as they were written."""
    words = {"run_id": facts.run_id} | ({"sample_id": facts.run.sample_id} if facts.run else {})
    others = [name for name, word in words.items() if not _all_are(batch[name], word)]
    return others + checksums.damaged(batch, sums)


def _all_are(column: pa.Array, word: str | None) -> bool:
    if word is None:
        return bool(column.null_count == len(column))
    return column.null_count == 0 and pc.all(pc.equal(column, word)).as_py() is not False


def read_all(path: Path) -> None:
    """Read every byte of a file.

    Raises:
        OSError: The disk cannot give one.
    """
    with path.open("rb", buffering=0) as file:
        while file.read(_CHUNK):
            pass


def _look_through(found: Verified) -> None:
    rows_of = dict[str, int]()
    batches, end = _look_at_batches(found, rows_of)
    with contextlib.suppress(DamagedError):  # found before
        for whole in whole_runs(found.path):
            rows = rows_of.pop(whole.facts.run_id, 0)
            if whole.facts.run_id not in found.damaged:
                found.runs += 1
                found.rows += rows
    found.unfinished = rows_of
    found.damaged = {run: names for run, names in found.damaged.items() if run not in rows_of}
    if found.damaged and found.state == "whole":
        found.state = "damaged"
        found.reason = "; ".join(f"of {run} changed {', '.join(names)}" for run, names in found.damaged.items())
    if found.state == "damaged":
        return
    size = size_of(found.path)
    if is_sealed(found.path):
        listed = footer(found.path).num_record_batches
        if batches < listed:
            found.state, found.reason = "damaged", f"batch {batches} of {listed} does not read, nor what is behind it"
        elif rows_of:
            found.state, found.reason = "cut short", "a run has no end"
    elif not batches:
        found.state, found.reason = "damaged", "no batch of an activation file can be read"
    elif rows_of or end != size:
        found.state = "cut short"
        found.reason = "a run has no end" if end == size else f"the last {size - end} bytes are no whole batch"
    else:
        found.state = "open"


def _look_at_batches(found: Verified, rows_of: dict[str, int]) -> tuple[int, int]:
    """Count each run's rows up to where batches are damaged: how many batches they are, and the place behind them."""
    batches = end = 0
    try:
        for batch, metadata, behind in messages(found.path):
            end = behind
            batch = batch.select(batch.schema.names)
            batch.validate(full=True)
            facts = batch_facts(metadata)
            bad = changed(batch, facts, checksums.read(metadata, batch.schema.names))
            if bad:
                known = found.damaged.setdefault(facts.run_id, [])
                known += [name for name in bad if name not in known]
            rows_of[facts.run_id] = rows_of.get(facts.run_id, 0) + batch.num_rows
            batches += 1
    except ValueError as error:  # also Arrow's, and a DamagedError
        found.state, found.reason = "damaged", f"batch {batches}: {error}"
    return batches, end
