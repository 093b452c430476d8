"""Evaluations side by side: what each reached in a condition, and how they differ problem by problem."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.compute as pc
import pyarrow.parquet as pq

from evals.config import EvalError
from evals.report.page import finished
from evals.report.screen import aligned, chances, columns, heads, interval, points
from evals.scoring import Rule
from evals.stats import holm, paired_difference

Record = dict[str, Any]
OWN_RULES = "outcomes are by each evaluation's own rule, accuracies and differences by that of the first"


class Run(NamedTuple):
    """An evaluation's results directory, and its name beside the others."""

    name: str
    directory: Path
    summary: Record


class Comparison(NamedTuple):
    """Evaluations in one condition, or in the only one that each has.

    Attributes:
        title: the condition.
        rule: the first evaluation's, by which all of them are compared.
        rows: name of the evaluation, and its part of summary.json.
        pairs: name of each other evaluation, and its accuracy less that of the first by problem; `p_holm` is corrected
            for all that `compare` gives.
    """

    title: str
    rule: Rule
    rows: list[tuple[str, Record]]
    pairs: list[tuple[str, Record]]


def load_runs(directories: Sequence[Path]) -> list[Run]:
    """The evaluations in these directories, in this order; each name is as much of the path as distinguishes them.

    Raises:
        EvalError: one holds no finished evaluation, or is named twice, perhaps by a link.
    """
    paths = [directory.expanduser().resolve() for directory in directories]
    if twice := [str(path) for path in paths if paths.count(path) > 1]:
        raise EvalError(f"a results directory is named twice: {twice[0]}")
    parts = 1
    while len({path.parts[-parts:] for path in paths}) < len(paths):
        parts += 1
    return [Run(Path(*path.parts[-parts:]).as_posix(), path, finished(path)) for path in paths]


def compare(runs: Sequence[Run]) -> list[Comparison]:
    """The first evaluation's conditions that others have, too; where there is none, the only one that each has.

    Raises:
        EvalError: they share no condition, and one of them has several.
    """
    conditions = [run.summary["conditions"] for run in runs]
    comparisons = [
        _compared(key, [(run, key) for run in runs if key in run.summary["conditions"]])
        for key in conditions[0]
        if any(key in other for other in conditions[1:])
    ]
    if not comparisons:
        if any(len(each) != 1 for each in conditions):
            listed = "; ".join(f"{run.name} has {', '.join(run.summary['conditions'])}" for run in runs)
            raise EvalError(f"the evaluations share no condition with the first: {listed}")
        keys = [next(iter(each)) for each in conditions]
        comparisons = [_compared(" and ".join(keys), [*zip(runs, keys, strict=True)])]
    pairs = [pair for of in comparisons for _, pair in of.pairs]
    for pair, p in zip(pairs, holm([pair["p"] for pair in pairs]), strict=True):
        pair["p_holm"] = p
    return comparisons


def render(comparisons: Sequence[Comparison]) -> str:
    """The comparison as aligned plain text."""
    lines = []
    for of in comparisons:
        rows = [["", *heads(of.rule)], *([name, *columns(condition, of.rule)] for name, condition in of.rows)]
        pairs = [_difference(of.rows[0][0], name, pair) for name, pair in of.pairs]
        lines += [of.title, "", aligned(rows), "", aligned(pairs), ""]
    return "\n".join([*lines, OWN_RULES])


def _compared(title: str, of: list[tuple[Run, str]]) -> Comparison:
    rule = of[0][0].summary["rule"]
    first, *others = (_correct(run.directory, run.summary["conditions"][key], rule) for run, key in of)
    names = [run.name for run, _ in of]
    return Comparison(
        title,
        rule,
        [(run.name, run.summary["conditions"][key]) for run, key in of],
        [(name, paired_difference(first, other)) for name, other in zip(names[1:], others, strict=True)],
    )


def _correct(directory: Path, condition: Record, rule: Rule) -> dict[str, list[bool]]:
    """By problem whether its answers are right by a rule; failed samples are not in it."""
    its = (pc.field("mode") == condition["mode"]) & (pc.field("variant") == condition["variant"])
    answered = its & pc.field("correct").is_valid()
    table = pq.read_table(directory / "samples.parquet", columns=["id", f"correct_{rule}"], filters=answered)
    answers: dict[str, list[bool]] = {}
    for problem, correct in zip(*(column.to_pylist() for column in table.columns), strict=True):
        answers.setdefault(problem, []).append(correct)
    return answers


def _difference(a: str, b: str, pair: Record) -> list[str]:
    if pair["difference"] is None:
        return [f"{b} less {a}", "they share no answered problem", "", "", ""]
    alone = f"{pair['problems']} problems, {pair['only_b']} right in {b} alone, {pair['only_a']} in {a} alone"
    bounds = f"95% interval {interval(pair['ci95'], points)}"
    return [f"{b} less {a}", f"{points(pair['difference'])} points", bounds, chances(pair), alone]
