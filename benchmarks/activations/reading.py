"""Compare reading stored activations for training with a plain memory map.

A session of several points in bfloat16, written by the store's writer, and the same vectors in one raw file per point,
`[rows, hidden]`; both are in the system's page cache. The benchmark reads batches in order and shuffled, by
`index_select` from the map and by `ActivationRows` in windows from the store.

The exit status is 1 if the store reads at less than 0.8 of the map's speed, in order or shuffled.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from benchmarks.activations.writing import facts, rows
from benchmarks.common.harness import Findings, Run, Way, in_turn, parser
from deployments.activations.index.index import Index
from deployments.activations.reader.training import ActivationRows
from deployments.activations.writer.writer import Writer
from deployments.interrupts import terminate_as_interrupt

HIDDEN, TOKENS = 1024, 400
POINTS = [f"layers.{layer}.output" for layer in (7, 14, 21)]
SEGMENT_BYTES = 256 << 20  # of each file
ROW = len(POINTS) * HIDDEN * 2  # bytes
MAP, MAP_SHUFFLED, ROWS, ROWS_SHUFFLED = "map, in order", "map, shuffled", "rows, in order", "rows, shuffled"
RATIOS = {(ROWS, MAP): 0.8, (ROWS_SHUFFLED, MAP_SHUFFLED): 0.8}


def write(folder: Path, runs: int) -> list[torch.Tensor]:
    """Write a session to `folder / "store"`, and map the same rows in a file for each point, [rows, hidden]."""
    root, shape = folder / "store", (runs * TOKENS, HIDDEN)
    root.mkdir()
    index = Index.open(root, path=folder / "index.sqlite3")
    writer = Writer(root, index, segment_bytes=SEGMENT_BYTES)
    raws = [np.memmap(folder / name, dtype=np.uint16, mode="w+", shape=shape) for name in POINTS]
    for number in range(runs):
        points = {name: torch.randn(TOKENS, HIDDEN).bfloat16() for name in POINTS}
        writer.submit(facts(f"run-{number}", TOKENS), [rows(points)]).result()
        for raw, value in zip(raws, points.values(), strict=True):
            raw[number * TOKENS : (number + 1) * TOKENS] = value.view(torch.uint16).numpy()
    writer.close()
    index.close()
    for raw in raws:
        raw.flush()
    del raws
    for path in filter(Path.is_file, folder.rglob("*")):  # as older files: a cache that writing filled has other pages
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while file.read(1 << 20):
                pass
    maps = (np.memmap(folder / name, dtype=np.uint16, mode="c", shape=shape) for name in POINTS)
    return [torch.from_numpy(one).view(torch.bfloat16) for one in maps]


def of_map(points: Sequence[torch.Tensor], size: int, shuffle: bool) -> Iterator[int]:
    """Read batches of `size` rows of points, each [rows, hidden]; gives the number of rows of each."""
    rows = len(points[0])
    order = torch.randperm(rows) if shuffle else None
    for row in range(0, rows, size):
        if order is None:
            batch = [point[row : row + size].clone() for point in points]
        else:
            batch = [point.index_select(0, order[row : row + size]) for point in points]
        yield len(batch[0])


def ways(store: Path, points: Sequence[torch.Tensor], size: int) -> list[Way]:
    """All ways, each of which reads every row once; rates are in MB/s."""
    count = len(points[0])
    in_order = ActivationRows(store, POINTS, batch_size=size, shuffle=False)
    shuffled = ActivationRows(store, POINTS, batch_size=size)

    def way(name: str, batches: Callable[[], Iterator[int]]) -> Way:
        def run() -> Run:
            began = time.perf_counter()
            read = sum(batches())
            if read != count:
                raise RuntimeError(f"{name}: {read} of {count} rows were read")
            return Run(count * ROW // 10**6, time.perf_counter() - began)

        return Way(name, run)

    return [
        way(MAP, lambda: of_map(points, size, shuffle=False)),
        way(MAP_SHUFFLED, lambda: of_map(points, size, shuffle=True)),
        way(ROWS, lambda: (len(batch.run) for batch in in_order)),
        way(ROWS_SHUFFLED, lambda: (len(batch.run) for batch in shuffled)),
    ]


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write the results; gives the exit status."""
    terminate_as_interrupt()
    parsing = parser(__doc__, "benchmark-reading", rounds=7)
    parsing.add_argument("--bytes", type=float, default=2e9, help="bytes of stored vectors")
    parsing.add_argument("--batch-size", type=int, default=1024, help="vectors per batch")
    parsing.add_argument("--directory", type=Path, help="directory for the temporary files")
    parsing.set_defaults(threads=1)  # as in a DataLoader's worker
    options = parsing.parse_args(arguments)
    torch.set_num_threads(options.threads)
    findings, runs = Findings(options, "MB/s"), max(1, int(options.bytes / ROW / TOKENS))
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="reading-") as name:
        points = write(Path(name), runs)
        measured = in_turn(ways(Path(name) / "store", points, options.batch_size), options.rounds)
        title = f"{runs * TOKENS} rows of {len(POINTS)} points, hidden {HIDDEN}, bfloat16"
        findings.add(title, measured, RATIOS)
    return findings.close()


if __name__ == "__main__":
    sys.exit(main())
