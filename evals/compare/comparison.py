"""Evaluations side by side: what each reached in a condition, how they differ by problem, and in their configs."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq

from evals.config import EvalError
from evals.report.page import finished
from evals.results.results import read_json
from evals.scoring import Rule
from evals.stats import holm, paired_difference

BATCH = 8192  # rows
MAX_SETTING = 300  # characters of a setting that are shown
MIN_COMMON_PREFIX = 40  # characters that texts begin with alike, before these are left out
CONTEXT = 10  # characters of them that are still shown
# What differs between any two evaluations, or says at length what other settings say in short.
NOT_COMPARED = (
    *("config.results_dir", "config.session_id", "config.resume", "server.health"),
    *("model.structure.points", "model.structure.modules", "model.created"),
)

Record = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """An evaluation's results directory, and what it is called beside the others."""

    name: str
    directory: Path
    summary: Record
    config: Record


class Comparison(NamedTuple):
    """Evaluations in one condition, or in the only one that each has.

    Attributes:
        title: the condition.
        rule: the first evaluation's, by which all of them are compared.
        rows: name of the evaluation, and its part of summary.json.
        speeds: tokens per second of the mode, by the evaluation's name.
        paired: the first evaluation's name, another's, and its accuracy less that of the first by problem; `p_holm` is
            corrected for all that `compare` gives.
    """

    title: str
    rule: Rule
    rows: list[tuple[str, Record]]
    speeds: dict[str, float | None]
    paired: list[tuple[str, str, Record]]


def load_runs(directories: Sequence[Path]) -> list[Run]:
    """The evaluations in these directories, in this order; each name is as much of the path as distinguishes them.

    Raises:
        EvalError: one holds no finished evaluation, or is named twice, perhaps by a link.
    """
    given = [directory.expanduser() for directory in directories]
    real: dict[Path, Path] = {}
    for directory in given:
        if first := real.get(directory.resolve()):
            raise EvalError(f"a results directory is named twice: {first} and {directory}")
        real[directory.resolve()] = directory
    # A name with `..` in it says nothing of where it leads.
    paths = [path.resolve() if ".." in path.parts else path.absolute() for path in given]
    parts = 1
    while len({path.parts[-parts:] for path in paths}) < len(paths):
        parts += 1
    names = [Path(*path.parts[-parts:]).as_posix() for path in paths]
    return [
        Run(name, path, finished(path), read_json(path / "config.json"))
        for name, path in zip(names, paths, strict=True)
    ]


def compare(runs: Sequence[Run]) -> list[Comparison]:
    """The conditions that at least two of the evaluations have; where there is none, the only one that each has.

    Raises:
        EvalError: they share no condition, and one of them has several.
    """
    keys = dict.fromkeys(key for run in runs for key in run.summary["conditions"])
    shared = {key: [(run, key) for run in runs if key in run.summary["conditions"]] for key in keys}
    found = [_compared(key, of) for key, of in shared.items() if len(of) > 1]
    if found:
        return _corrected(found)
    if any(len(run.summary["conditions"]) != 1 for run in runs):
        listed = "; ".join(f"{run.name} has {', '.join(run.summary['conditions'])}" for run in runs)
        raise EvalError(f"the evaluations share no condition: {listed}")
    only = [(run, next(iter(run.summary["conditions"]))) for run in runs]
    return _corrected([_compared(" and ".join(key for _, key in only), only)])


def _corrected(found: list[Comparison]) -> list[Comparison]:
    """The same with each p value corrected by Holm for all differences."""
    pairs = [pair for of in found for _, _, pair in of.paired]
    for pair, p in zip(pairs, holm([pair["p"] for pair in pairs]), strict=True):
        pair["p_holm"] = p
    return found


def differing(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """The settings that differ between evaluations: name, and each one's value as text, `-` where it has none.

    Whole texts are compared; of long ones that begin alike, the part in which they differ is shown.
    """
    settings_of = [dict(_settings(run.config)) for run in runs]
    names = dict.fromkeys(name for settings in settings_of for name in settings)
    rows = [(name, [settings.get(name, "-") for settings in settings_of]) for name in names]
    return [(name, _short(values)) for name, values in rows if len(set(values)) > 1]


def _compared(title: str, of: list[tuple[Run, str]]) -> Comparison:
    conditions = [(run, run.summary["conditions"][key]) for run, key in of]
    (first, its), *others = conditions
    rule = first.summary["rule"]
    a = _correct(first.directory, its["mode"], its["variant"], rule)
    paired = []
    for run, condition in others:
        b = _correct(run.directory, condition["mode"], condition["variant"], rule)
        paired.append((first.name, run.name, paired_difference(a, b)))
    return Comparison(
        title,
        rule,
        [(run.name, condition) for run, condition in conditions],
        {run.name: run.summary["modes"][condition["mode"]]["tokens_per_second"] for run, condition in conditions},
        paired,
    )


def _correct(directory: Path, mode: str, variant: str, rule: Rule) -> dict[str, list[bool]]:
    """By problem whether its answers are right by a rule; failed samples are not in it."""
    found: dict[str, list[bool]] = {}
    column = f"correct_{rule}"
    with pq.ParquetFile(directory / "samples.parquet") as file:
        for batch in file.iter_batches(batch_size=BATCH, columns=["id", "mode", "variant", "correct", column]):
            for row in batch.to_pylist():
                if row["mode"] == mode and row["variant"] == variant and row["correct"] is not None:
                    found.setdefault(row["id"], []).append(row[column])
    return found


def _short(values: Sequence[str]) -> list[str]:
    alike = len(commonprefix(values))
    begin = alike - CONTEXT if alike > MIN_COMMON_PREFIX else 0
    texts = [f"...{value[begin:]}" if begin else value for value in values]
    return [text if len(text) <= MAX_SETTING else f"{text[:MAX_SETTING]}..." for text in texts]


def _settings(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    if name.startswith(NOT_COMPARED):
        return
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _settings(inner, f"{name}.{key}" if name else str(key))
    elif value is not None:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        yield name, text
