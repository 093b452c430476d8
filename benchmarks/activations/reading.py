"""Reading stored rows for training compared with a plain memory map: `python -m benchmarks.activations.reading`.

A session of several points in bfloat16, written as the store does, and the same rows in one raw file,
`[points, rows, hidden]`. Both are read from disk before anything is timed, and so are in the system's page cache.
  map, in order         numpy.memmap of the raw file, each batch of each point cloned
  map, shuffled         the same map, each batch gathered by random row numbers
  map, shuffled, numpy  the same by numpy's own indexing
  rows, in order        ActivationRows, not shuffled
  rows, shuffled        ActivationRows, shuffled in windows
  rows, one window      ActivationRows, shuffled in a window of everything, as the map is

Ends with 1 where the rows are read at less than 0.8 of the map's speed: in order against in order, and shuffled against
shuffled by the same operation, `index_select`, since a gather costs more than a copy whoever does it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from benchmarks.common import stored
from benchmarks.common.findings import Findings, parser_of
from benchmarks.common.measuring import Ratio, Run, Way
from deployments.activations.facts import SessionName
from deployments.activations.reader.training import ActivationRows
from deployments.activations.segments.segment_writer import Segment
from deployments.interrupts import terminate_as_interrupt

SESSION, HIDDEN, TOKENS = "measured", 1024, 400
POINTS = [f"layers.{layer}.output" for layer in (7, 14, 21)]
ROW = len(POINTS) * HIDDEN * 2  # bytes
MIN_RATIO = 0.8
MAP, MAP_SHUFFLED, MAP_NUMPY = "map, in order", "map, shuffled", "map, shuffled, numpy"
ROWS, ROWS_SHUFFLED, ROWS_ALL = "rows, in order", "rows, shuffled", "rows, one window"
REQUIRED = [Ratio(ROWS, MAP), Ratio(ROWS_SHUFFLED, MAP_SHUFFLED)]
REPORTED = [Ratio(ROWS_ALL, MAP_SHUFFLED), Ratio(ROWS_SHUFFLED, MAP_NUMPY), Ratio(ROWS_SHUFFLED, MAP)]


def store(folder: Path, runs: int, segment_bytes: int) -> None:
    """Write a session to `folder / "store"`, and the same rows to `folder / "raw"`."""
    (folder / "store").mkdir()
    segment: Segment | None = None
    raws = [(folder / f"raw-{i}").open("wb") for i in range(len(POINTS))]
    for number in range(runs):
        points = {name: torch.randn(TOKENS, HIDDEN).bfloat16() for name in POINTS}
        batch = stored.rows(SESSION, points, run_id := f"run-{number}")
        if segment is not None and segment.size >= segment_bytes:
            segment.close()
            segment = None
        if segment is None:
            segment = Segment(folder / "store", SessionName(None, SESSION), f"{number:06}.arrow", batch.schema)
        segment.finish(stored.facts(SESSION, run_id, TOKENS), [batch])
        for raw, value in zip(raws, points.values(), strict=True):
            raw.write(value.view(torch.uint16).numpy().data)
    if segment is not None:
        segment.close()
    with (folder / "raw").open("wb") as joined:
        for raw in raws:
            raw.close()
            with open(raw.name, "rb") as part:
                shutil.copyfileobj(part, joined, 1 << 20)
            Path(raw.name).unlink()


def reread(folder: Path) -> None:
    """Fill the system's cache by reading, as for older files; a cache filled by writing has another layout."""
    for path in (item for item in folder.rglob("*") if item.is_file()):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while file.read(1 << 20):
                pass


def maps(folder: Path, rows: int, size: int) -> dict[str, Callable[[], Iterator[list[torch.Tensor]]]]:
    """Name of a way to read the map -> what begins it, and gives batches: [points] tensors [rows, hidden]."""
    # Copy on write, else torch warns that it cannot keep anybody from writing.
    raw = np.memmap(folder / "raw", dtype=np.uint16, mode="c", shape=(len(POINTS), rows, HIDDEN))
    points = list(torch.from_numpy(raw).view(torch.bfloat16))

    def in_order() -> Iterator[list[torch.Tensor]]:
        for row in range(0, rows, size):
            yield [point[row : row + size].clone() for point in points]

    def shuffled() -> Iterator[list[torch.Tensor]]:
        order = torch.randperm(rows)
        for row in range(0, rows, size):
            yield [point.index_select(0, order[row : row + size]) for point in points]

    def by_numpy() -> Iterator[list[torch.Tensor]]:
        order = np.random.default_rng(0).permutation(rows)
        for row in range(0, rows, size):
            chosen = order[row : row + size]
            yield [torch.from_numpy(point[chosen]).view(torch.bfloat16) for point in raw]

    return {MAP: in_order, MAP_SHUFFLED: shuffled, MAP_NUMPY: by_numpy}


def readers(folder: Path, size: int, window: int) -> dict[str, ActivationRows]:
    """Name of a way to read the store -> the dataset that does so."""
    source = folder / "store"
    return {
        ROWS: ActivationRows(source, POINTS, batch_size=size, shuffle=False),
        ROWS_SHUFFLED: ActivationRows(source, POINTS, batch_size=size, window_bytes=window),
        ROWS_ALL: ActivationRows(source, POINTS, batch_size=size, window_bytes=1 << 50),
    }


def ways(folder: Path, rows: int, options: argparse.Namespace) -> list[Way]:
    """All ways, each of which reads every row once; rates are in MB/s."""
    megabytes = rows * ROW // 10**6

    def of_map(batches: Callable[[], Iterator[list[torch.Tensor]]]) -> Callable[[], Run]:
        return lambda: _timed(lambda: sum(len(batch[0]) for batch in batches()), rows, megabytes)

    def of_rows(batches: ActivationRows) -> Callable[[], Run]:
        return lambda: _timed(lambda: sum(len(batch.run) for batch in batches), rows, megabytes)

    ours = readers(folder, options.batch_size, options.window)
    theirs = maps(folder, rows, options.batch_size)
    return [Way(name, of_map(each)) for name, each in theirs.items()] + [
        Way(name, of_rows(each)) for name, each in ours.items()
    ]


def _timed(work: Callable[[], int], rows: int, megabytes: int) -> Run:
    began = time.perf_counter()
    read = work()
    seconds = time.perf_counter() - began
    if read != rows:
        raise RuntimeError(f"{read} of {rows} rows were read")
    return Run((), megabytes, seconds)


def same(folder: Path, rows: int) -> bool:
    """Whether the store holds the rows of the raw file."""
    raw = np.memmap(folder / "raw", dtype=np.uint16, mode="r", shape=(len(POINTS), rows, HIDDEN))
    at = 0
    for batch in ActivationRows(folder / "store", POINTS, batch_size=4096, shuffle=False):
        for name, point in zip(POINTS, raw, strict=True):
            if not np.array_equal(batch.points[name].view(torch.uint16).numpy(), point[at : at + len(batch.run)]):
                return False
        at += len(batch.run)
    return at == rows


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write the results; gives the exit status."""
    terminate_as_interrupt()
    parser = parser_of(__doc__, "benchmark-reading", rounds=7)
    parser.add_argument("--bytes", type=float, default=2e9, help="of stored rows")
    parser.add_argument("--segment-bytes", type=int, default=256 << 20, help="of each file")
    parser.add_argument("--batch-size", type=int, default=1024, help="rows of a batch")
    parser.add_argument("--window", type=int, default=256 << 20, help="bytes of rows that are shuffled together")
    parser.set_defaults(threads=1)  # as in a DataLoader's worker
    parser.add_argument("--directory", type=Path, help="where the rows are written meanwhile")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    findings, runs = Findings(options, unit="MB/s"), max(1, int(options.bytes / ROW / TOKENS))
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="reading-") as name:
        folder, rows = Path(name), runs * TOKENS
        store(folder, runs, options.segment_bytes)
        reread(folder)
        if not same(folder, rows):
            findings.failed.append("the rows that were read are not those that were written")
        title = f"{rows} rows of {len(POINTS)} points, hidden {HIDDEN}, bfloat16"
        measured = ways(folder, rows, options)
        findings.compare(title, "reading", measured, REQUIRED + REPORTED, MAP, options.rounds)
    findings.require(title, "reading", REQUIRED, MIN_RATIO)
    return findings.close()


if __name__ == "__main__":
    sys.exit(main())
