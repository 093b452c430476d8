"""Compare the activation store's writer with the raw disk.

The store's writer gets runs of six points in bfloat16 and confirms each when it is durable. In turn, `write` puts as
many bytes into one file on the same disk, with a sync for the number of runs that end together.
  disk          write and fsync of the same bytes
  writer        complete runs of 2.5 MB, twice as many in flight as the disk syncs together
  writer, long  runs four times as long, each in four parts

The exit status is 1 if the writer's rate is below 0.85 of the disk's.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from benchmarks.common.harness import Findings, Run, Way, in_turn, parser
from deployments.activations.facts import FileInfo, RunInfo
from deployments.activations.index.index import Index
from deployments.activations.segments.columns import to_batch
from deployments.activations.writer.writer import Writer
from deployments.interrupts import terminate_as_interrupt

HIDDEN, TOKENS, PARTS = 1024, 200, 4
POINTS = [f"layers.{layer}.{site}.output" for layer in (7, 14, 21) for site in ("input_layernorm", "mlp")]
SIZE = TOKENS * HIDDEN * 2 * len(POINTS)  # bytes of a part
NAME = "measured"  # of the session and the model
DISK, WHOLE, LONG = "disk", "writer", "writer, long"
RATIOS = {(WHOLE, DISK): 0.85, (LONG, DISK): 0.85}


def rows(points: Mapping[str, torch.Tensor], first: int = 0) -> pa.RecordBatch:
    """Points' values, each [tokens, hidden], of prompt tokens from position `first` on, as the writer takes them."""
    count = len(next(iter(points.values())))
    positions = range(first, first + count)
    return to_batch(
        FileInfo(NAME, NAME, None, NAME, {}, {name: name for name in points}),
        run_id="r",
        sample_id=None,
        positions=positions,
        token_ids=positions,
        prompt_tokens=first + count,
        points=points,
    )


def facts(run_id: str, tokens: int) -> RunInfo:
    """The facts of a run whose tokens are all of its prompt."""
    return RunInfo(run_id, NAME, NAME, 0.0, tokens, tokens)


class Disk:
    """A directory on the disk, to which so many parts are written, `at_once` of them in one group."""

    def __init__(self, folder: Path, count: int, at_once: int) -> None:
        """Make the rows before anything is timed, few enough to stay in memory; they are written again and again."""
        self._folder, self._count, self._at_once = folder, count, at_once
        self._parts = [
            rows({name: torch.randn(TOKENS, HIDDEN).bfloat16() for name in POINTS}, first)
            for _ in range(at_once)
            for first in range(0, PARTS * TOKENS, TOKENS)
        ]

    def raw(self) -> Run:
        """Write the points' bytes to one file, synced as often as runs end together; counts MB."""
        path, parts = self._folder / "raw", self._parts[::PARTS]
        columns = [[part[name].storage.flatten().buffers()[1] for name in POINTS] for part in parts]
        began = time.perf_counter()
        with path.open("xb", buffering=0) as file:
            for number in range(self._count):
                for buffer in columns[number % self._at_once]:
                    view = memoryview(buffer)
                    while view:
                        view = view[file.write(view) :]
                if (number + 1) % self._at_once == 0 or number + 1 == self._count:
                    os.fsync(file)
        run = self._run(began)
        path.unlink()
        return run

    def written(self, parts: int) -> Run:
        """Send all to a writer, in runs of so many parts, and wait until each run is durable; counts MB."""
        root, index_path = self._folder / "store", self._folder / "index.sqlite3"
        root.mkdir()
        index = Index.open(root, path=index_path)
        writer = Writer(root, index)
        began, sent = time.perf_counter(), deque[Future[Any]]()
        for done in self._sent(writer, parts):
            sent.append(done)
            if len(sent) == 2 * self._at_once // parts:
                sent.popleft().result()
        for done in sent:
            done.result()
        run = self._run(began)
        writer.close()
        index.close()
        shutil.rmtree(root)
        index_path.unlink()
        return run

    def _sent(self, writer: Writer, parts: int) -> Iterator[Future[Any]]:
        """Send all runs; gives what is done when each is durable."""
        for number in range(self._count // parts):
            first = number % self._at_once * PARTS
            run = facts(f"run-{number}", TOKENS * parts)
            for part in range(parts - 1):
                writer.append(run.session, run.run_id, part, [self._parts[first + part]])
            yield writer.submit(run, [self._parts[first + parts - 1]], parts - 1)

    def _run(self, began: float) -> Run:
        return Run(self._count * SIZE // 10**6, time.perf_counter() - began)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write the results; gives the exit status."""
    terminate_as_interrupt()
    parsing = parser(__doc__, "benchmark-writing", rounds=7)
    parsing.add_argument("--bytes", type=float, default=1e9, help="bytes of each measurement")
    parsing.add_argument("--at-once", type=int, default=32, help="runs per sync of the disk")
    parsing.add_argument("--directory", type=Path, help="directory on the disk to measure")
    parsing.set_defaults(threads=1)
    options = parsing.parse_args(arguments)
    torch.set_num_threads(options.threads)
    findings, count = Findings(options, "MB/s"), PARTS * max(1, int(options.bytes / SIZE / PARTS))
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="writing-") as name:
        disk = Disk(Path(name), count, options.at_once)
        ways = [Way(DISK, disk.raw), Way(WHOLE, lambda: disk.written(1)), Way(LONG, lambda: disk.written(PARTS))]
        measured = in_turn(ways, options.rounds)
        findings.add(f"{count * SIZE / 1e9:.1f} GB, {options.at_once} runs at once", measured, RATIOS)
    return findings.close()


if __name__ == "__main__":
    sys.exit(main())
