"""Verifies stored files, finds what can still be read of damaged ones, and seals copies."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pyarrow as pa

from deployments.activations.segments.schema import batch_info, is_intact
from deployments.activations.segments.segment_writer import rewrite
from deployments.activations.segments.segments import DamagedError, batches_of, listed_batches, whole_runs

State = Literal["whole", "open", "cut short", "damaged", "unreadable"]
_CHUNK = 1 << 20


@dataclass
class Verified:
    """The state of a file after reading every byte of it."""

    # `whole` with its footer; `open` without it, every run whole; `cut short` within a run; `damaged` where a checksum
    # differs, batches that the footer lists do not read, or nothing is ours; `unreadable` where the disk refuses.
    state: State = "whole"
    reason: str = ""  # what is wrong, in words
    runs: int = 0  # whole ones, of which nothing changed
    rows: int = 0  # of these
    unfinished: dict[str, int] = field(default_factory=dict)  # rows of whole batches by the run that has no end

    @property
    def ok(self) -> bool:
        """Whether every run of the file is whole."""
        return self.state in ("whole", "open")


def verify(path: str | os.PathLike[str]) -> Verified:
    """Read every byte and every batch of a file, and compare checksums.

    A checksum covers a batch's values and all that it says, not the padding between, nor the footer's details.
    """
    result, path = Verified(), Path(path)
    try:
        read_all(path)  # first, since a page that the disk cannot give would end a process that maps the file
        _look_through(result, path)
    except OSError as error:
        result.state, result.reason = "unreadable", error.strerror or str(error)
    return result


def seal(path: Path, runs: Set[str]) -> bool:
    """Give a file that was copied without its end a footer; false where it lacks one of `runs`, or has none.

    DamagedError names what is not as it was written, OSError if the disk refuses.
    """
    found_runs = list(whole_runs(path))
    if not found_runs or runs - {run.facts.run_id for run in found_runs}:
        return False
    for run in found_runs:
        if bad := run.damage():
            raise DamagedError(f"{', '.join(bad)} of run {run.facts.run_id} is not what was written")
    rewrite(path, found_runs[0].batches[0].schema, [batch for run in found_runs for batch in run.batches], path.parent)
    return True


def read_all(path: Path) -> None:
    """Read every byte of a file; OSError if the disk cannot give one."""
    with path.open("rb", buffering=0) as file:
        while file.read(_CHUNK):
            pass


def _look_through(result: Verified, path: Path) -> None:
    batches, end, changed = 0, 0, dict[str, list[str]]()  # by run, batches whose checksum differs
    rows = result.unfinished  # of every run at first
    try:
        for batch in batches_of(path):
            end, facts, count = batch.end, batch_info(batch.metadata), batch.num_rows
            if not is_intact(batch.select(), batch.metadata):
                changed.setdefault(facts.run_id, []).append(str(facts.number))
            rows[facts.run_id] = rows.get(facts.run_id, 0) + count
            batches += 1
        problem = ""
    except (pa.ArrowException, ValueError, KeyError) as error:  # a DamagedError is a ValueError
        problem = f"batch {batches}: {error}"
    with contextlib.suppress(DamagedError):  # found before
        for whole in whole_runs(path):
            if (count := rows.pop(whole.facts.run_id, 0)) and whole.facts.run_id not in changed:
                result.runs += 1
                result.rows += count
    listed, size = listed_batches(path), path.stat().st_size
    if changed:
        which = (f"of {run} batch {', '.join(numbers)}" for run, numbers in changed.items())
        problem = problem or f"not as they were written: {'; '.join(which)}"
    elif not batches:
        problem = problem or "no batch of an activation file can be read"
    elif listed not in (None, batches):
        problem = problem or f"batch {batches} of {listed} and all after it cannot be read"
    if problem:
        result.state, result.reason = "damaged", problem
    elif listed is None and end != size:
        result.state, result.reason = "cut short", f"the last {size - end} bytes are not a complete batch"
    elif rows:
        result.state, result.reason = "cut short", "a run has no end"
    else:
        result.state = "open" if listed is None else "whole"
