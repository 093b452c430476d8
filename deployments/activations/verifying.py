"""Whether stored files are whole, and what can still be read of those that are not."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pyarrow as pa

from deployments.activations.reader import is_sealed, messages, whole_runs
from deployments.activations.schema import batch_facts

State = Literal["whole", "open", "cut short", "damaged", "unreadable"]
_CHUNK = 1 << 20


@dataclass
class Verified:
    """What a look at every byte of a file found.

    Attributes:
        path: The file.
        state: `whole` with its footer; `open` without it, every run whole (of a server that still writes, or was killed
            and has not started again); `cut short` within a run; `damaged` where batches that the footer lists do not
            read, or there is nothing of ours; `unreadable` where the disk refuses.
        reason: What is wrong, in words; empty where nothing is.
        runs: Whole runs.
        rows: Their rows.
        unfinished: Rows of whole batches by the run that has no end.
    """

    path: Path
    state: State = "whole"
    reason: str = ""
    runs: int = 0
    rows: int = 0
    unfinished: dict[str, int] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether every run of the file is whole."""
        return self.state in ("whole", "open")


def verify(path: Path) -> Verified:
    """Read every byte and every batch of a file. There are no checksums: a changed number is not found."""
    found = Verified(path)
    try:
        read_all(path)  # first, since a page that the disk cannot give would end who maps the file
        _look_through(found)
    except OSError as error:
        found.state, found.reason = "unreadable", error.strerror or str(error)
    return found


def read_all(path: Path) -> None:
    """Read every byte of a file.

    Raises:
        OSError: The disk cannot give one.
    """
    with path.open("rb", buffering=0) as file:
        while file.read(_CHUNK):
            pass


def _look_through(found: Verified) -> None:
    rows_of, batches, end = dict[str, int](), 0, 0
    for batch, metadata, behind in messages(found.path):
        end = behind
        try:
            batch.validate(full=True)
            run = batch_facts(metadata).run_id
        except (pa.ArrowInvalid, ValueError) as error:
            found.state, found.reason = "damaged", f"batch {batches}: {error}"
            break
        rows_of[run] = rows_of.get(run, 0) + batch.num_rows
        batches += 1
    for whole in whole_runs(found.path):
        found.runs += 1
        found.rows += rows_of.pop(whole.facts.run_id, 0)
    found.unfinished = rows_of
    if found.state == "damaged":
        return
    size = found.path.stat().st_size
    if is_sealed(found.path):
        listed = pa.ipc.open_file(pa.OSFile(str(found.path))).num_record_batches
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
