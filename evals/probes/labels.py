"""Labels, groups and token spans of runs: from their tags, an evaluation's results, or a file written later."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from deployments.activations.facts import RunInfo
from evals.config import EvalError
from evals.labels import inspect_log
from evals.labels.table import as_number, labelled
from evals.results.transfer import files_of
from evals.task.problems import json_lines

_TRUE = ("true", "1", "yes")
NAMED = 8  # label values that a refusal lists


class RunLabels(NamedTuple):
    """A run's label and group, None where it has none, and its spans by name: `[first, end)` token positions."""

    label: str | None
    group: str | None
    spans: Mapping[str, tuple[int, int]]


NO_LABELS = RunLabels(None, None, {})


@dataclass(frozen=True)
class Source:
    """Labels, groups and spans by run."""

    of: Callable[[RunInfo], RunLabels | None]  # A run's; None where it is none of the examples
    unused: set[str] = field(default_factory=set)  # names of the rows for which no run was asked yet
    tags: Collection[str] = ()  # names of the tags that it reads


def from_tags(label: str, group: str | None) -> Source:
    """Labels and groups that were stored with the runs.

    Args:
        label: A tag's name.
        group: A tag's name; None without groups.
    """

    def of(run: RunInfo) -> RunLabels:
        return RunLabels(label_text(run.tags.get(label)), run.tags.get(group) if group else None, {})

    return Source(of, tags=(label, *([group] if group else [])))


def from_evaluation(
    results: Path | None, log: Path | None, label: str, group: str | None, spans: Collection[str], store: Path | None
) -> tuple[str, Path | None, Source]:
    """Labels of an evaluation's runs by `evals.labels`.

    Args:
        results: A results directory of `evals.gsm8k`; or None with
        log: A log of inspect_ai.
        label: A column, as `correct`, or a scorer's name.
        group: A column, as `problem`; None without groups.
        spans: Names of spans.
        store: The store's directory; None is the one that the results name.

    Returns:
        The session of the runs, its store where one is known, and the rows. Other runs of the session, as of failed
        samples and earlier turns, are no examples.

    Raises:
        EvalError: There is no such column, not one session, or its store cannot be read from here.
    """
    if results is not None:
        table, directory, option = labelled(results), results, f"--results {results}"
    else:
        assert log is not None
        table, directory, option = inspect_log.labelled(log), log.parent, f"--inspect {log}"
    sessions = table["session_id"].unique().to_pylist()
    if len(sessions) != 1:
        names = ", ".join(map(str, sessions[:NAMED])) or "none"
        raise EvalError(f"{option}: the runs are of {len(sessions)} sessions ({names}): choose runs of one")
    rows = _columns(table, option.partition(" ")[0], label, group, spans)
    uri = next((uri for uri in table["uri"].to_pylist() if uri), None)
    if store is None and uri is not None:
        try:
            store = files_of(directory, sessions[0], uri).parent
        except ValueError as error:
            reason = str(error)
            if log is not None:  # nothing transfers the runs of a log
                pull = f"`python -m deployments.activations pull http://HOST:8000 {sessions[0]} --dir COPY`"
                reason = f"{uri.rpartition('/')[0]} cannot be read from this machine: use {pull}, then --store COPY"
            raise EvalError(f"{option}: {reason}") from error
    return sessions[0], store, _joined(rows, "run_id", label, group, spans, missing=None)


def from_file(path: Path, label: str, group: str | None, spans: Collection[str]) -> Source:
    """Labels of a csv, Parquet or jsonl file with a column `run_id`, or `id` for the runs' sample ids.

    Args:
        path: The file.
        label: A column.
        group: A column; where there is none of that name, a tag of the runs.
        spans: Names of spans; each is a column `span.<name>`.

    Raises:
        EvalError: The file cannot be read, lacks a column, names a run twice, or has a span that is none.
    """
    try:
        rows = _read(path)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise EvalError(f"--labels {path}: {error}") from error
    names = {name for row in rows for name in row if name}  # None for cells too many
    key = "run_id" if "run_id" in names else "id"
    wanted = [key, label, *(f"span.{name}" for name in spans)]
    if missing := [name for name in wanted if name not in names]:
        listed = ", ".join(sorted(names)) or "none"
        raise EvalError(f"--labels {path}: no column {missing[0]!r}; there is {listed}")
    return _joined(rows, key, label, group if group in names else None, spans, tag=group)


def text(value: Any) -> str | None:
    """A value as a string: true for a bool, numbers as JSON writes them; None where there is none."""
    if value is None or value == "":
        return None
    return value if isinstance(value, str) else json.dumps(value)


def label_text(value: Any) -> str | None:
    """A label's value as `text`, equal numbers alike: the tag `1`, the cell `1.0` and the number 1 are one label."""
    written = text(value)
    value = None if written is None else as_number(written)
    return written if value is None else json.dumps(value)


def classes(values: Sequence[str], positive: str | None) -> tuple[str, np.ndarray]:
    """Which label is the positive class, and which examples have it, bool `[n]`.

    Args:
        values: The labels.
        positive: The value that `--positive` names; all others are then the negative class.

    Raises:
        EvalError: There is one class, or more than two and none was chosen, or the one that was chosen is missing.
    """
    counts = Counter(values)
    listed = ", ".join(f"{value!r} ({count})" for value, count in counts.most_common(NAMED))
    listed += ", ..." if len(counts) > NAMED else ""
    if len(counts) < 2:
        raise EvalError(f"--label: {len(values)} examples have one class, {listed}; two classes are needed")
    if positive is None and len(counts) > 2:
        raise EvalError(
            f"--label: {len(counts)} labels, {listed}: choose one with --positive; all others "
            "are then the negative class",
        )
    if positive is not None and positive not in counts:
        raise EvalError(f"--positive {positive!r}: no example has this label; there are {listed}")
    last = max(counts, key=lambda value: (as_number(value) or 0, value))  # of texts the last, of numbers the largest
    chosen = positive or next((value for value in sorted(counts) if value.lower() in _TRUE), last)
    return chosen, np.array([value == chosen for value in values])


def _read(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
        rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
        return rows
    if path.suffix == ".csv":
        with path.open(encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))
    if path.suffix in (".jsonl", ".json"):
        return [row for _, row in json_lines(path)]
    raise ValueError("not a .csv, .parquet or .jsonl file")


def _columns(
    table: pa.Table, option: str, label: str, group: str | None, spans: Collection[str]
) -> Iterable[dict[str, Any]]:
    wanted = list(dict.fromkeys(["run_id", label, *([group] if group else []), *(f"span.{name}" for name in spans)]))
    if missing := [name for name in wanted if name not in table.column_names]:
        raise EvalError(f"{option}: no column {missing[0]!r}; there is {', '.join(table.column_names)}")
    rows: list[dict[str, Any]] = table.select(wanted).to_pylist()
    return rows


def _joined(
    rows: Iterable[Mapping[str, Any]],
    key: str,
    label: str,
    group: str | None,
    spans: Collection[str],
    tag: str | None = None,
    missing: RunLabels | None = NO_LABELS,
) -> Source:
    labels, unused = dict[str, RunLabels](), set[str]()
    repeated = 0
    for number, row in enumerate(rows, 1):
        at = {name: _span(f"span.{name}", span) for name in spans if (span := row.get(f"span.{name}"))}
        name = text(row.get(key))
        repeated += name in labels
        unused.add(f"row {number}, without {key}" if name is None else name)
        if name is not None:
            labels[name] = RunLabels(label_text(row.get(label)), text(row.get(group)) if group else None, at)
    if repeated:
        raise EvalError(f"--labels: {repeated} rows repeat the {key} of another row")

    def of(run: RunInfo) -> RunLabels | None:
        name = run.run_id if key == "run_id" else run.sample_id or ""
        unused.discard(name)
        row = labels.get(name, missing)
        return row if row is None or group or not tag else row._replace(group=run.tags.get(tag))

    return Source(of, unused, (tag,) if tag else ())


def _span(column: str, value: Any) -> tuple[int, int]:
    """A span's two positions, from a list of them or its JSON."""
    try:
        first, end = json.loads(value) if isinstance(value, str) else value
        if type(first) is type(end) is int:
            return first, end
    except (TypeError, ValueError):
        pass
    raise EvalError(f"--labels: {column} is {value!r}, not two positions such as [3, 5]")
