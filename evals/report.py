"""What a run leaves behind: samples and dataset.jsonl as they come, summary.json at the end."""

import json
import platform
from collections import Counter
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from evals.config import Config, EvalError, Mode
from evals.stats import paired_difference, proportion, quantiles
from evals.trajectory import Sample

ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "uint8": 1}


class Tally:
    """Counts of one mode; keeps a few numbers per problem, no text."""

    def __init__(self, mode: Mode) -> None:
        self.mode = mode
        self.outcomes: dict[str, bool] = {}  # by problem, by the strict rule; failed ones are not in it
        self.counts: Counter[str] = Counter()
        self._latencies: list[float] = []  # seconds
        self._started = float("inf")
        self._ended = 0.0

    def add(self, sample: Sample) -> None:
        """Counts one sample."""
        self._started = min(self._started, sample.started)
        self._ended = max(self._ended, sample.ended)
        self._latencies.append(sample.latency_s)
        if sample.correct is not None:
            self.outcomes[sample.id] = sample.correct
        self.counts += Counter(
            samples=1,
            failed=int(sample.error is not None),
            strict=int(bool(sample.correct)),
            flexible=int(bool(sample.correct_flexible)),
            invalid=int(sample.error is None and sample.strict is None),
            truncated=int(sample.error is None and sample.finish_reason == "length"),
            turn_limit=int(sample.turn_limit),
            prompt=sum(turn.prompt_tokens for turn in sample.turns),
            completion=sum(turn.completion_tokens for turn in sample.turns),
        )

    @property
    def accuracy(self) -> float | None:
        """By the strict rule, so far, over what was answered."""
        return self.counts["strict"] / len(self.outcomes) if self.outcomes else None

    def summary(self) -> dict[str, Any]:
        """The mode's part of summary.json; accuracies are over the answered samples."""
        wall = max(self._ended - self._started, 0.0)
        answered = len(self.outcomes)
        return {
            "strict": proportion(self.counts["strict"], answered),
            "flexible": proportion(self.counts["flexible"], answered),
            "samples": self.counts["samples"],
            "failed": self.counts["failed"],
            "invalid": self.counts["invalid"],
            "truncated": self.counts["truncated"],
            "turn_limit": self.counts["turn_limit"],
            "prompt_tokens": self.counts["prompt"],
            "completion_tokens": self.counts["completion"],
            "wall_s": wall,
            "tokens_per_second": self.counts["completion"] / wall if wall else None,
            "latency_s": quantiles(self._latencies),
        }


class Recorded(NamedTuple):
    """One point of one run, enough to load it."""

    uri: str
    run_id: str
    point: str


class ActivationTally:
    """What was recorded, by the server's own answers."""

    def __init__(self, session_id: str) -> None:
        self._session_id = session_id
        self._counts: Counter[str] = Counter()
        self._statuses: Counter[str] = Counter()
        self._points: set[str] = set()
        self._files: set[str] = set()
        self.example: Recorded | None = None

    def add(self, sample: Sample) -> None:
        """Counts the runs of one sample."""
        for turn in sample.turns:
            meta = turn.activations or {"status": "missing"}
            self._statuses[str(meta.get("status"))] += 1
            for run in meta.get("runs", []):
                points = run.get("points") or {}
                self._counts += Counter(runs=1, tokens=run["tokens"])
                self._points |= points.keys()
                for name, at in points.items():
                    self._files.add(at["uri"])
                    self._counts["bytes"] += prod(at["shape"]) * ITEM_BYTES.get(at["dtype"], 0)
                    self.example = self.example or Recorded(at["uri"], run["run_id"], name)

    def summary(self) -> dict[str, Any]:
        """The activations' part of summary.json; bytes are of the tensors, without the files' own framing."""
        return {
            "session_id": self._session_id,
            "points": sorted(self._points),
            "runs": self._counts["runs"],
            "tokens": self._counts["tokens"],
            "bytes": self._counts["bytes"],
            "where": sorted({uri.rpartition("/")[0] for uri in self._files}),
            "files": len(self._files),
            "statuses": dict(self._statuses),
            "not_stored": self._statuses.total() - self._statuses["stored"],
        }


class ResultsWriter:
    """The results directory. A context: it holds dataset.jsonl open."""

    def __init__(self, directory: Path) -> None:
        """Makes the directory.

        Raises:
            EvalError: it cannot be made, or holds something already.
        """
        self.directory = directory
        try:
            (directory / "samples").mkdir(parents=True, exist_ok=False)
        except OSError as error:
            raise EvalError(f"--results-dir {directory}: not usable for a new run: {error}") from error
        self._lines = (directory / "dataset.jsonl").open("w", encoding="utf-8")

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes dataset.jsonl."""
        self._lines.close()

    def add(self, sample: Sample) -> None:
        """Writes the sample's file and its line, at once."""
        _write_json(self.directory / "samples" / f"{sample.id}.{sample.mode}.json", sample.model_dump())
        self._lines.write(json.dumps(dataset_row(sample), ensure_ascii=False) + "\n")
        self._lines.flush()

    def finish(self, summary: dict[str, Any]) -> None:
        """Writes summary.json."""
        _write_json(self.directory / "summary.json", summary)


def dataset_row(sample: Sample) -> dict[str, Any]:
    """The sample's line in dataset.jsonl."""
    metas = [turn.activations for turn in sample.turns if turn.activations]
    runs = [run for meta in metas for run in meta.get("runs", [])]
    uris = {at["uri"] for run in runs for at in (run.get("points") or {}).values()}
    kept = sample.model_dump(exclude={"turns", "messages", "started", "ended"})
    return kept | {
        "turns": len(sample.turns),
        "usage": {
            "prompt_tokens": sum(turn.prompt_tokens for turn in sample.turns),
            "completion_tokens": sum(turn.completion_tokens for turn in sample.turns),
        },
        "session_id": metas[0].get("session_id") if metas else None,
        "run_ids": [run["run_id"] for run in runs],
        "activation_uris": sorted(uris),
    }


def summarize(
    config: Config,
    tallies: list[Tally],
    activations: ActivationTally | None,
    *,
    problems: int,
    started: datetime,
    incomplete: str | None,
) -> dict[str, Any]:
    """All of summary.json; `incomplete` says why a run ended early."""
    ended = datetime.now(UTC)
    a, b = (tally.outcomes for tally in tallies) if len(tallies) == 2 else ({}, {})
    return {
        "model": config.model,
        "dataset": config.dataset,
        "counts": {
            "problems": problems,
            "samples": sum(tally.counts["samples"] for tally in tallies),
            "failed": sum(tally.counts["failed"] for tally in tallies),
            "missing": sum(problems - tally.counts["samples"] for tally in tallies),
        },
        "incomplete": incomplete,
        "modes": {tally.mode: tally.summary() for tally in tallies},
        "with_tools_less_no_tools": paired_difference(a, b) if len(tallies) == 2 else None,
        "activations": activations.summary() if activations else None,
        "config": config.model_dump(mode="json"),
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
        "times": {
            "started": started.isoformat(timespec="seconds"),
            "ended": ended.isoformat(timespec="seconds"),
            "seconds": (ended - started).total_seconds(),
        },
    }


PACKAGES = ("vitrine", "ray", "pyarrow", "httpx", "pydantic")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _write_json(path: Path, content: dict[str, Any]) -> None:
    """Whole or not at all: a reader, or a run that is killed, never leaves half a file."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False), encoding="utf-8")
    part.replace(path)
