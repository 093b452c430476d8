"""The index of stored runs, 100,000 of them in 1,000 sessions: `python -m benchmarks.activations.index`.

Each run has three tags, one token and one small point. The files are written as the store writes them. It measures

  queries                    each kind `--rounds` times: the median and the slowest; also of one session that has all
                             the runs, each in a file of its own
  a commit                   what the index adds to storing a run, by how many runs are committed together
  a start                    with the database that is kept, and from the files alone
  a run's place              loading the last of 10,000 runs of a file, with and without the byte where it begins

Ends with 1 if a query's median is over 50 ms.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from unittest import mock

import torch

from benchmarks.common import report
from benchmarks.common.findings import Findings, parser_of
from deployments.activations import load
from deployments.activations.facts import FileUpdate, RunFacts, RunName, SegmentFacts, SessionName, StoredFile
from deployments.activations.filters import Filter
from deployments.activations.index.database import in_memory
from deployments.activations.index.index import Index
from deployments.activations.segments.columns import to_batch
from deployments.activations.writer.writer import Writer
from deployments.interrupts import terminate_as_interrupt

LIMIT = 0.05  # seconds
MODELS = ("org/model", "org/rare")  # a thousandth of the runs is the second's
CREATED = 1_700_000_000.0  # of the first run; each is a second after the one before
POINT = "layers.0.output"
NAME = ".index.sqlite3"  # of the database, in the directory that is measured


class Recorder(Index):
    """An index that keeps what it is told of stored runs, and lists none."""

    def __init__(self, root: Path) -> None:
        """Nothing yet."""
        super().__init__(in_memory(), root)
        self.commits: list[FileUpdate] = []

    def add(self, *updates: FileUpdate) -> None:
        """Keep what is told of files that have runs."""
        self.commits += [update for update in updates if update.entries]


def run(number: int, session_id: str) -> RunFacts:
    """The facts of one of the runs, in a session."""
    mixed = number + number // 1000  # so that those of a session differ
    tags = {"study": "all", "condition": "ab"[mixed % 2], "problem": str(mixed % 1000)}
    return RunFacts(
        run_id=f"{number * 2654435761 % 2**32:08x}-{number}",  # in no order, as a server's are
        session_id=session_id,
        model=MODELS[number % 1000 == 999],
        created=CREATED + number,
        prompt_tokens=1,
        tokens=1,
        sample_id=f"q{mixed % 5000}",
        tags=tags,
        sampling={"temperature": 0.0, "top_p": 1.0, "seed": number},
        finish_reason="stop",
        request_id=f"{number:032x}",
        messages_hash=f"{number:064x}",
    )


def store(root: Path, index: Index, runs: int, sessions: int) -> None:
    """Write the runs, a session's in one commit; nothing waits for the disk, which is not what is measured."""
    with mock.patch.object(os, "fsync", return_value=None):
        _write(Writer(root, index), runs, sessions)


def _write(writer: Writer, runs: int, sessions: int) -> None:
    for session in range(sessions):
        session_id, made = f"session-{session:05}", []
        for number in range(session, runs, sessions):
            facts = run(number, session_id)
            segment = SegmentFacts(
                session_id, facts.model, None, "Measured", {"torch": torch.__version__}, {POINT: POINT}
            )
            batch = to_batch(
                segment,
                run_id=facts.run_id,
                sample_id=facts.sample_id,
                positions=[0],
                token_ids=[0],
                prompt_tokens=1,
                points={POINT: torch.zeros(1, 4)},
            )
            made.append((facts, batch))
        for future in [writer.submit(facts, [batch]) for facts, batch in made]:
            future.result()
    writer.close()


def seconds(work: Callable[[], object]) -> float:
    """Seconds that something takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def queries(runs: int) -> dict[str, tuple[str, Filter, int]]:
    """Name of a query -> `runs` or `sessions`, what is asked for, and the length of a page."""
    end = CREATED + runs
    rare, common, half = (("problem", "17"),), (("study", "all"),), (("condition", "a"),)
    filters = {
        "all": Filter(),
        "a session": Filter("session-00017"),
        "a model, most runs": Filter(model=MODELS[0]),
        "a model, 1 in 1,000 runs": Filter(model=MODELS[1]),
        "a hundredth of the time": Filter(since=end - runs / 100),
        "half of the time": Filter(since=CREATED + runs / 4, until=end - runs / 4),
        "a sample": Filter(sample_id="q17"),
        "a tag, 1 in 1,000 runs": Filter(tags=rare),
        "a tag, half of the runs": Filter(tags=half),
        "a tag, all runs": Filter(tags=common),
        "two tags that no run has together": Filter(tags=(*half, *rare)),  # 17 is odd, and its condition b
        "everything at once": Filter("session-00016", MODELS[0], CREATED, end, "q16", (*half, *common)),
    }
    found = {f"runs: {name}": ("runs", filter, 100) for name, filter in filters.items()}
    found |= {f"sessions: {name}": ("sessions", filter, 100) for name, filter in filters.items()}
    found |= {f"1,000 sessions: {name}": ("sessions", filter, 1000) for name, filter in filters.items()}
    return found


def ask(index: Index, runs: int, times: int) -> dict[str, list[float]]:
    """Name of a query -> [times] seconds."""
    middle, last = (index.runs(Filter(since=CREATED + at), 1)[0]["run_id"] for at in (runs // 2, runs - 101))
    asked: dict[str, Callable[[], object]] = {}
    for name, (kind, filter, limit) in queries(runs).items():
        if kind == "runs":
            asked[name] = lambda filter=filter, limit=limit: index.runs(filter, limit)  # type: ignore[misc]
        else:
            asked[name] = lambda filter=filter, limit=limit: index.sessions(limit, None, filter)  # type: ignore[misc]
    asked |= {
        "runs: from the middle": lambda: index.runs(after=middle),
        "runs: the last page": lambda: index.runs(after=last),
        "runs: a page of 1,000": lambda: index.runs(limit=1000),
        "a session with its runs": lambda: index.session(SessionName(None, "session-00017")),
        "a run by its id": lambda: index.find(middle),
        "whether a session has a run": lambda: index.holds(RunName(SessionName(None, "session-00017"), middle)),
    }
    return {name: [seconds(query) for _ in range(times)] for name, query in asked.items()}


def one_session(folder: Path, commits: list[FileUpdate], times: int) -> dict[str, list[float]]:
    """Name of a query -> [times] seconds, of one session that has all runs, each in a file of its own."""
    folder.mkdir()
    index, session = Index.open(folder, path=folder / NAME), SessionName(None, "all")
    updates = list[FileUpdate]()
    for entry in (entry for _, entries, _ in commits for entry in entries):
        path = f"{session.folder}/{len(updates):06}.arrow"
        alone = entry._replace(path=path, first_row=0, offset=0)
        updates.append(FileUpdate(session, [alone], StoredFile(path, entry.bytes, True, entry.rows, 1)))
    for start in range(0, len(updates), 1000):
        index.add(*updates[start : start + 1000])
    middle = index.runs(Filter(since=CREATED + len(updates) // 2), 1)[0]["run_id"]
    asked: dict[str, Callable[[], object]] = {
        "a session with all runs in files of their own": lambda: index.session(session, 100),
        "the same from the middle": lambda: index.session(session, 100, middle),
        "sessions, of which one has as many files": lambda: index.sessions(),
    }
    found = {name: [seconds(query) for _ in range(times)] for name, query in asked.items()}
    index.close()
    shutil.rmtree(folder)
    return found


def commit(folder: Path, commits: list[FileUpdate], at_once: int) -> float:
    """Seconds that the index takes for a run, where so many of a file are committed together."""
    folder.mkdir()
    index, count, spent = Index.open(folder, path=folder / NAME), 0, 0.0
    for session, entries, file in commits:
        for start in range(0, len(entries), at_once):
            some, now = entries[start : start + at_once], file._replace(rows=start + at_once, sealed=False)
            spent += seconds(lambda: index.add(FileUpdate(session, some, now)))  # noqa: B023
            count += len(some)
    index.close()
    shutil.rmtree(folder)
    return spent / count


def places(folder: Path, runs: int, times: int) -> dict[str, float]:
    """Median seconds of loading the last of a file's runs, with the byte where it begins and without."""
    folder.mkdir()
    index = Index.scanned(folder)
    store(folder, index, runs, 1)
    [last] = index.session(SessionName(None, "session-00000"), after=run(runs - 2, "").run_id)["runs"]  # type: ignore[index]
    path, run_id, offset = last["points"][POINT]["uri"], last["run_id"], last["offset"]
    found = {
        "from the file's start": median(seconds(lambda: load(path, run_id)) for _ in range(times)),
        "where it begins": median(seconds(lambda: load(path, run_id, offset=offset)) for _ in range(times)),
    }
    shutil.rmtree(folder)
    return found


def measure(root: Path, options: argparse.Namespace, findings: Findings) -> None:
    """Measure queries, commits, starts and loads, below an empty directory."""
    title, kept = f"{options.runs} runs in {options.sessions} sessions", root / "kept"
    kept.mkdir()
    recorder = Recorder(kept)
    wrote = seconds(lambda: store(kept, recorder, options.runs, options.sessions))
    print(f"  written in {wrote:.0f} s", flush=True)
    starts = {"from the files alone": seconds(lambda: Index.open(kept, path=kept / NAME).close())}
    for path in kept.glob("*/*/*.arrow"):
        os.utime(path, (CREATED, CREATED))  # those that are new would be read again
    Index.open(kept, path=kept / NAME).close()
    starts["over the kept database"] = median(
        seconds(lambda: Index.open(kept, path=kept / NAME).close()) for _ in range(5)
    )
    starts["MB of the database"] = (kept / NAME).stat().st_size / 1e6
    _show(findings, title, "a start, in seconds", starts, 1)
    index = Index.open(kept, path=kept / NAME)
    found = ask(index, options.runs, options.rounds)
    found |= one_session(root / "one", recorder.commits, options.rounds)
    rows = [[name, f"{median(times) * 1e3:.2f}", f"{max(times) * 1e3:.2f}"] for name, times in found.items()]
    print(report.table("queries", ["ms", "median", "worst"], rows), flush=True)
    findings.add(title, "queries, in seconds", found)
    slow = {name: median(times) for name, times in found.items() if median(times) > LIMIT}
    findings.failed += [f"{name}: {taken * 1e3:.0f} ms" for name, taken in slow.items()]
    index.close()
    adding = {
        f"{n} at once": commit(root / "commits", recorder.commits[: options.sessions // 4], n) for n in (1, 10, 100)
    }
    _show(findings, title, "a commit, in microseconds a run", adding, 1e6)
    found_last = places(root / "places", 9999, options.rounds)
    _show(findings, title, "loading the last of 10,000 runs of a file, in ms", found_last, 1e3)


def _show(findings: Findings, title: str, name: str, found: dict[str, float], scale: float) -> None:
    print(report.table(name, ["", ""], [[key, f"{value * scale:.2f}"] for key, value in found.items()]), flush=True)
    findings.add(title, name, found)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write the results; gives the exit status."""
    terminate_as_interrupt()
    parser = parser_of(__doc__, "benchmark-index", rounds=20)
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--sessions", type=int, default=1000)
    options = parser.parse_args(arguments)
    options.results.parent.mkdir(parents=True, exist_ok=True)
    findings = Findings(options)
    with tempfile.TemporaryDirectory(prefix="index-", dir=options.results.parent) as folder:
        measure(Path(folder).resolve(), options, findings)
    return findings.close()


if __name__ == "__main__":
    sys.exit(main())
