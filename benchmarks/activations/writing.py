"""The activation store's writer compared with the raw disk: `python -m benchmarks.activations.writing`.

Runs of six points in bfloat16 go to the store's own writer, each answered once it is durable. In the same turns as many
bytes go by `write` to one file on the same disk, synced each time as many runs are written as end together.
  disk           write and fsync of the same bytes
  disk, summed   the same, with the checksums that the store makes
  writer         whole runs of 2.5 MB, twice as many on their way as the disk syncs together
  writer, long   runs four times as long, each in four parts, as those come that are larger than a replica's piece:
                 3 MB with 32 that record at once, 16 MB with few
  writer, small  runs of 2.5 MB in four parts, smaller ones than replicas send
  writer, apart  whole runs of 2.5 MB, each in a session of its own

Ends with 1 where the writer's rate is below 0.85 of the disk's, small parts aside.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from benchmarks.common.findings import Findings, parser_of
from benchmarks.common.measuring import Ratio, Run, Way
from benchmarks.common.stored import facts, rows
from deployments.activations.facts import RunFacts
from deployments.activations.index.index import Index
from deployments.activations.segments.checksums import of_content
from deployments.activations.segments.schema import METADATA_KEY
from deployments.activations.writer.writer import Writer
from deployments.interrupts import terminate_as_interrupt

HIDDEN, TOKENS, PARTS = 1024, 200, 4
POINTS = [f"layers.{layer}.{site}.output" for layer in (7, 14, 21) for site in ("input_layernorm", "mlp")]
MIN_RATIO = 0.85
DISK, SUMMED, WHOLE, LONG, SMALL = "disk", "disk, summed", "writer", "writer, long", "writer, small"
APART = "writer, apart"
REQUIRED = [Ratio(WHOLE, DISK), Ratio(LONG, DISK)]
REPORTED = [Ratio(SMALL, DISK), Ratio(APART, DISK), Ratio(SUMMED, DISK), Ratio(WHOLE, SUMMED)]


def random_rows(first: int, count: int) -> pa.RecordBatch:
    """Rows of a run, six points of random [count, hidden] in bfloat16, from position `first` on."""
    return rows("s", {name: torch.randn(count, HIDDEN).bfloat16() for name in POINTS}, first=first)


def in_session(batch: pa.RecordBatch, run: RunFacts) -> pa.RecordBatch:
    """The same rows of a run of another session."""
    said = json.loads(batch.schema.metadata[METADATA_KEY]) | {"session_id": run.session_id}
    return batch.replace_schema_metadata({METADATA_KEY: json.dumps(said)})


class Disk:
    """A directory on the disk, and the runs that are written there: `runs` in all, `at_once` of them in one group."""

    def __init__(self, folder: Path, runs: int, at_once: int) -> None:
        self._folder = folder
        self._runs = runs
        self.at_once = at_once
        self._turn = 0
        # Made before anything is timed, and small enough to stay in memory; the same rows again and again.
        self._whole = [random_rows(0, TOKENS) for _ in range(at_once)]
        size = TOKENS // PARTS
        self._small = [[random_rows(part * size, size) for part in range(PARTS)] for _ in range(at_once)]
        self._long = [
            [random_rows(part * TOKENS, TOKENS) for part in range(PARTS)] for _ in range(-(-at_once // PARTS))
        ]
        self.bytes = runs * TOKENS * HIDDEN * 2 * len(POINTS)

    def raw(self, summed: bool) -> Run:
        """Write the points' bytes to one file, synced as often as runs end together; counts MB."""
        path = self._folder / f"raw-{self._turn}"
        columns = [[batch[name].storage.flatten().buffers()[1] for name in POINTS] for batch in self._whole]
        began = time.perf_counter()
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        for number in range(self._runs):
            if summed:
                of_content(self._whole[number % self.at_once])
            for buffer in columns[number % self.at_once]:
                view = memoryview(buffer)
                while view:
                    view = view[os.write(file, view) :]
            if (number + 1) % self.at_once == 0 or number + 1 == self._runs:
                os.fsync(file)
        os.close(file)
        return self._ended(began, path)

    def written(self, send: Callable[[Writer, int], Sequence[Future[Any]]], most: int) -> Run:
        """Send all runs to a writer, `most` on their way, and wait until each is durable; counts MB."""
        root = self._folder / f"store-{self._turn}"
        root.mkdir()
        index = Index.open(root, path=self._folder / f"index-{self._turn}.sqlite3")
        writer = Writer(root, index)
        began = time.perf_counter()
        sent = deque[Future[Any]]()
        for number in range(self._runs):
            sent.extend(send(writer, number)[-1:])  # its end is behind its parts
            if len(sent) == most:
                sent.popleft().result()
        for future in sent:
            future.result()
        run = self._ended(began, None)
        writer.close()
        index.close()
        shutil.rmtree(root)
        return run

    def whole(self, writer: Writer, number: int) -> list[Future[Any]]:
        """Send a run in one piece; gives what is done when it is durable."""
        return [writer.submit(facts("s", f"run-{number}", TOKENS), [self._whole[number % self.at_once]])]

    def apart(self, writer: Writer, number: int) -> list[Future[Any]]:
        """Send a run of a session of its own; gives what is done when it is durable."""
        run, batch = facts(f"s-{number}", f"run-{number}", TOKENS), self._whole[number % self.at_once]
        return [writer.submit(run, [in_session(batch, run)])]

    def small(self, writer: Writer, number: int) -> list[Future[Any]]:
        """Send a run in small parts; gives what is done when each is durable."""
        return self._in_parts(writer, number, self._small[number % len(self._small)])

    def long(self, writer: Writer, number: int) -> list[Future[Any]]:
        """Send a long run in parts, in place of as many runs as it has parts."""
        return [] if number % PARTS else self._in_parts(writer, number, self._long[number // PARTS % len(self._long)])

    def _in_parts(self, writer: Writer, number: int, parts: list[pa.RecordBatch]) -> list[Future[Any]]:
        run = facts("s", f"run-{number}", TOKENS)
        sent: list[Future[Any]] = [
            writer.append(run.session, run.run_id, part, [parts[part]]) for part in range(PARTS - 1)
        ]
        return [*sent, writer.submit(run, parts[PARTS - 1 :], PARTS - 1)]

    def _ended(self, began: float, path: Path | None) -> Run:
        seconds = time.perf_counter() - began
        self._turn += 1
        if path:
            path.unlink()
        return Run((), self.bytes // 10**6, seconds)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write the results; gives the exit status."""
    terminate_as_interrupt()
    parser = parser_of(__doc__, "benchmark-writing", rounds=7)
    parser.add_argument("--bytes", type=float, default=1e9, help="of each turn")
    parser.add_argument(
        "--at-once", type=int, default=32, help="runs that end together, for whose bytes the disk is synced once"
    )
    parser.set_defaults(threads=1)
    parser.add_argument("--directory", type=Path, help="on the disk that is measured")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    findings = Findings(options, unit="MB/s")
    runs = PARTS * max(1, int(options.bytes / (TOKENS * HIDDEN * 2 * len(POINTS) * PARTS)))
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="writing-") as name:
        disk = Disk(Path(name), runs, options.at_once)
        ways = [
            Way(DISK, lambda: disk.raw(summed=False)),
            Way(WHOLE, lambda: disk.written(disk.whole, 2 * disk.at_once)),
            Way(SUMMED, lambda: disk.raw(summed=True)),
            Way(LONG, lambda: disk.written(disk.long, 2 * disk.at_once // PARTS)),
            Way(SMALL, lambda: disk.written(disk.small, 2 * disk.at_once)),
            Way(APART, lambda: disk.written(disk.apart, 2 * disk.at_once)),
        ]
        title = f"{disk.bytes / 1e9:.1f} GB, {options.at_once} runs at once"
        findings.compare(title, "writing", ways, REQUIRED + REPORTED, DISK, options.rounds)
    findings.require(title, "writing", REQUIRED, MIN_RATIO)
    return findings.close()


if __name__ == "__main__":
    sys.exit(main())
