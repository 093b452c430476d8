"""Cases in which the activation store's writer might become slow: `python -m benchmarks.activations.cliffs`.

  one session    runs per second of 0.1 MB each, in one session
  sessions       the same, with one session per run
  full           the same in one session of a full store, which deletes an old session for each run
  deleting       the same in one session, while sessions of many files are deleted
  start          seconds until a store has checked its files, all of them in its catalogue, and until a store with an
                 empty disk knows them from the manifest of their bucket, which is a directory here

Each answer waits until its run is durable.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.stored import facts, rows
from deployments.activations.catalogue.catalogue import Catalogue
from deployments.activations.catalogue.database import NAME, sealed_files
from deployments.activations.catalogue.manifest import Manifest
from deployments.activations.catalogue.replaying import write_snapshot
from deployments.activations.files.places import place_of
from deployments.activations.limits import Retention
from deployments.activations.writer.recovery import recover
from deployments.activations.writer.writer import Writer

MOST_IN_FLIGHT = 512  # runs on their way


def send(writer: Writer, runs: int, session: Callable[[int], str], values: torch.Tensor) -> float:
    """Store runs with these rows, each in the session of its number; gives durable runs per second."""
    names = {session(number) for number in range(runs)}
    batches = {name: rows(name, {"p": values}) for name in names}
    began, sent = time.perf_counter(), deque[Future[Any]]()
    for number in range(runs):
        name = session(number)
        sent.append(writer.submit(facts(name, f"r-{number}", len(values)), [batches[name]]))
        if len(sent) == MOST_IN_FLIGHT:
            sent.popleft().result()
    for future in sent:
        future.result()
    return runs / (time.perf_counter() - began)


def main() -> None:
    """Measure, and print runs per second and seconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20_000)
    parser.add_argument("--sessions", type=int, default=2_000)
    parser.add_argument("--files", type=int, default=10_000, help="that are deleted")
    parser.add_argument("--known", type=int, default=1_000_000, help="runs at the start")
    parser.add_argument("--known-files", type=int, default=1_000)
    parser.add_argument("--directory", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    values = torch.randn(24, 1024)
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="cliffs-") as name:
        root = Path(name)
        catalogue = Catalogue.rebuild(root)
        writer = Writer(root, catalogue)
        send(writer, 500, lambda _: "warm", values)
        alone = send(writer, options.runs, lambda _: "one", values)
        print(f"one session: {alone:,.0f} runs/s", flush=True)
        print(f"sessions: {send(writer, options.sessions, lambda n: f's{n}', values):,.0f} runs/s", flush=True)
        print(f"full: {full(writer, options.sessions // 2, values):,.0f} runs/s", flush=True)
        for session in range(10):
            (root / f"old{session}").mkdir()
            for number in range(options.files // 10):
                (root / f"old{session}" / f"20200101T000000-00000000-{number:06}.arrow").write_bytes(bytes(4096))
        alone = send(writer, options.runs, lambda _: "two", values)
        gone = [writer.delete(f"old{session}") for session in range(10)]
        beside = send(writer, options.runs, lambda _: "three", values)
        done = sum(future.done() for future in gone)
        for future in gone:
            future.result()
        print(
            f"deleting {options.files} files: {beside:,.0f} of {alone:,.0f} runs/s, {beside / alone:.2f} "
            f"({done} of {len(gone)} sessions were gone at the end)",
            flush=True,
        )
        writer.close()
        catalogue.close()
        shutil.rmtree(root)
        root.mkdir()
        if options.known:
            known(root, options.known, options.known_files)


def full(writer: Writer, runs: int, values: torch.Tensor) -> float:
    """Store runs while as many bytes are allowed as there are; gives durable runs per second."""
    logging.disable(logging.WARNING)  # of each session that is deleted
    used = writer.ask(lambda manager: manager.used().total()).result()
    writer.retain(Retention(max_store_bytes=used, delete_oldest=True)).result()
    rate = send(writer, runs, lambda _: "full", values)
    writer.retain(Retention()).result()
    logging.disable(logging.NOTSET)
    return rate


def known(root: Path, runs: int, files: int) -> None:
    """Make a store with many runs in its catalogue; print the seconds of starts from its disk and its manifest."""
    catalogue = Catalogue.rebuild(root)
    writer = Writer(root, catalogue, segment_bytes=1, open_segments=64)
    small = torch.zeros(1, 2)
    send(writer, files, lambda number: f"s{number % 100}", small)
    writer.close()
    database, each, new = catalogue._database, runs // files, "run_id || '+' || i"
    columns = "session, {}, file, created, model, sample_id, tags, tokens, bytes, rows, first_row, offset, facts"
    database.execute("BEGIN")
    database.execute(
        f"INSERT INTO runs ({columns.format('run_id')}) WITH RECURSIVE n(i) AS "
        f"(SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {each} - 1) "
        f"SELECT {columns.format(new)} FROM runs, n"
    )
    database.execute("COMMIT")
    [count] = database.execute("SELECT count(*) FROM runs").fetchone()
    catalogue.close()
    began = time.perf_counter()
    recover(root, sealed_files(root))
    recovered = time.perf_counter() - began
    catalogue = Catalogue.rebuild(root)
    print(
        f"start over {count:,} runs in {files:,} files: {time.perf_counter() - began:.2f} s, {recovered:.2f} s recover"
    )
    catalogue._database.execute("UPDATE files SET archived = 1")
    catalogue.close()
    (root / ".bucket" / ".manifest").mkdir(parents=True)
    manifest = Manifest(place_of((root / ".bucket").as_uri()), root=root)
    write_snapshot(root / NAME, root / ".copy")
    name = manifest.put_snapshot(root / ".copy")
    began = time.perf_counter()
    catalogue = Catalogue.rebuild(root / ".new", manifest)
    catalogue.catch_up()
    taken, size = time.perf_counter() - began, manifest.names()[name] / 1e6
    [(count,)] = catalogue.select("SELECT count(*) FROM runs")
    print(f"start over {count:,} runs of a manifest, {size:.0f} MB: {taken:.2f} s")
    catalogue.close()


if __name__ == "__main__":
    main()
