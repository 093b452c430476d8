"""The census of a session: outlier features, massive activations beside them, and what zeroing outliers costs."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from evals.config import EvalError, some
from evals.outliers import features, massive
from evals.outliers.ablation import ablate, check_points, read_prompts
from evals.outliers.census_report import write
from evals.outliers.counts import Counts
from evals.outliers.stored import INPUTS, RESIDUAL, Stored
from evals.outliers.texts import add_tokens, stored_prompts

Record = dict[str, Any]
MOST_SHOWN = 64  # features of a map


class Ablation(NamedTuple):
    """How zeroing is measured.

    Attributes:
        base_url: The server's, ends in `/v1`; it serves the session's model by the same id.
        texts: A file of JSON lines with `text` or `prompt`; without it the session's own runs.
        most: The most texts.
        seeds: How many draws of random features.
    """

    base_url: str
    texts: Path | None = None
    most: int = 100
    seeds: int = 5


def census(
    source: str | os.PathLike[str],
    session: str,
    out: Path,
    *,
    points: Sequence[str] | None = None,
    massive_points: Sequence[str] | None = None,
    rule: features.Rule = features.Rule(),  # noqa: B008
    massive_rule: massive.Rule = massive.Rule(),  # noqa: B008
    ablation: Ablation | None = None,
) -> Record:
    """Look through all rows of a session and write what is found, in memory of a batch and of points times features.

    Args:
        source: The store's directory.
        session: Which session.
        out: The directory to write outliers.json and report.html to.
        points: Names, in which `*` is any layer; without them the inputs of attention's and the MLP's first
            projections.
        massive_points: The same of the residual stream; without them the outputs of layers, where there are any.
        rule: When a feature is an outlier.
        massive_rule: When a value is a massive activation.
        ablation: Whether to measure what zeroing the outliers costs.

    Returns:
        What outliers.json holds; docs/outliers.md describes it.

    Raises:
        EvalError: The session lacks points, its runs do not fit together, or no row is finite.
        ValueError: As `index_rows` says.
        FileNotFoundError: There is no such store or session.
        RequestFailed: The server refused, or did not answer.
    """
    stored = Stored(source, session, INPUTS if points is None else points)
    counts = _counted(features.count(stored, rule.magnitude), "--points")
    found: Record = {
        "session": session,
        "model": stored.model,
        **_about(counts),
        "thresholds": rule._asdict(),
        "features": counts.records(features.outliers(counts, rule)),
        "map": _map(counts),
        "massive": _massive(source, session, RESIDUAL if massive_points is None else massive_points, massive_rule),
    } | dict.fromkeys(("ablation", "ablation_why_not"))
    add_tokens(source, session, [one["where"] for of in (found, found["massive"]) for one in of["features"]])
    write(out, found)  # also where no server answers
    if ablation:
        found |= _ablated(source, session, stored, sorted(one["feature"] for one in found["features"]), ablation)
        write(out, found)
    return found


def _ablated(
    source: str | os.PathLike[str], session: str, stored: Stored, outliers: list[int], ablation: Ablation
) -> Record:
    if not outliers:
        return {"ablation_why_not": "there is no outlier to set to zero"}
    prompts = _prompts(source, session, ablation)
    points, width, model = stored.points, stored.width, stored.model
    check_points(ablation.base_url, model, points, width)
    return {"ablation": ablate(ablation.base_url, model, prompts, points, outliers, width, seeds=ablation.seeds)}


def _massive(
    source: str | os.PathLike[str], session: str, points: re.Pattern[str] | Sequence[str], rule: massive.Rule
) -> Record:
    option = "--massive-points"
    try:
        counts = _counted(massive.count(Stored(source, session, points, option), rule), option)
    except EvalError as error:
        if not isinstance(points, re.Pattern):
            raise
        return {"why_not": str(error), "thresholds": rule._asdict(), "features": []}

    def median(point: int, feature: int) -> Record:
        return {"median": float(counts.beside[point, feature])}

    of = np.flatnonzero(counts.positions)
    return {
        "why_not": None,
        **_about(counts),
        "thresholds": rule._asdict(),
        "features": counts.records(of, median),
        "map": _map(counts),
    }


def _counted(counts: Counts, option: str) -> Counts:
    if not counts.rows:
        points = counts.stored.points
        many = f"{counts.not_finite} rows is finite at all {len(points)} of {some(points)}"
        raise EvalError(f"{option}: none of {many}: choose others")
    return counts


def _about(counts: Counts) -> Record:
    stored = counts.stored
    return {
        "points": stored.points,
        "layers": counts.layers.tolist(),
        "width": stored.width,
        "runs": len(stored.index.runs),
        "runs_left_out": stored.left_out,
        "tokens": counts.rows,
        "tokens_not_finite": counts.not_finite,
    }


def _map(counts: Counts) -> Record:
    """The largest magnitude by layer and feature, of the features with large values at the most positions.

    `largest` is None where no value counted; `of` says how many features have one that did.
    """
    by_layer, there = counts.largest_by_layer(), np.flatnonzero(counts.positions)
    shown = np.sort(there[np.argsort(-counts.positions[there], kind="stable")][:MOST_SHOWN])
    return {
        "of": len(there),
        "features": shown.tolist(),
        "positions": (counts.positions[shown] / counts.rows).tolist(),
        "layers": (by_layer[:, shown] > 0).sum(axis=0).tolist(),
        "largest": [[value or None for value in row] for row in by_layer[:, shown].tolist()],
    }


def _prompts(source: str | os.PathLike[str], session: str, ablation: Ablation) -> list[Any]:
    if ablation.texts:
        return read_prompts(ablation.texts, ablation.most)
    prompts, without = stored_prompts(source, session, ablation.most, seed=0)
    if not prompts:
        raise EvalError(f"--ablate: none of {without} runs has its text and all of its tokens stored: give --texts")
    return prompts
