"""report.html of a sweep: one page without scripts that needs nothing else."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.special import expit
from sklearn.metrics import roc_curve

from deployments.activations import load
from evals.probes.fitting.fitting import FitJob
from evals.probes.fitting.headline import Headline
from evals.probes.fitting.score_figures import bins
from evals.probes.inputs.examples import Example, Examples, by_site
from evals.report.charts import SHARES, Scale
from evals.report.page import template
from evals.results.results import write_whole

NAME = "report.html"
_BARS = 20
_SHOWN = 4  # examples of a kind
_TOKENS = 160  # tokens of an example
_BEFORE = 400  # characters of text before the first stored token


class Token(NamedTuple):
    """A token's text and its probability; None where its row is not stored."""

    text: str
    probability: float | None


def write(out: Path, document: dict[str, Any], examples: Examples, job: FitJob, headline: Headline) -> None:
    """Write the page, whole or not at all.

    Args:
        out: The directory.
        document: As `probes.json` has it.
        examples: The examples.
        job: Their classes and folds.
        headline: The probes.
    """
    context = {
        "d": document,
        "h": document["headline"],
        "shares": SHARES,
        "panels": panels(document["rows"], document["nulls"], document["lengths"]),
        "histogram": histogram(headline.held_out.probabilities, job.positive),
        "roc": roc(headline.held_out.logits, job.positive, job.folds.of),
        "calibration": bins(headline.held_out.probabilities, job.positive),
        "kinds": shown(examples, job, headline),
    }
    write_whole(out / NAME, template("probes.html.jinja").render(context))


def panels(
    rows: Sequence[dict[str, Any]], nulls: Sequence[dict[str, Any]], lengths: dict[str, float | None]
) -> list[dict[str, Any]]:
    """A chart for each site and choice of tokens: AUROC by layer, from 0 to 100 on both axes."""
    found = []
    places = dict.fromkeys((by_site(row["point"])[0], row["tokens"]) for row in rows)
    with_null = [row | (null["control"] or {"low": None, "high": None}) for row, null in zip(rows, nulls, strict=True)]
    drawn = [row[name] for row in with_null for name in ("auroc", "auroc_low", "low", "text_auroc")]
    lowest = min(value for value in (*drawn, *lengths.values()) if value is not None)
    low = min(0.4, np.floor(10 * lowest) / 10)
    y = Scale(low, 1.0, tuple(np.arange(round(10 * low), 11, 2 if low < 0.3 else 1) / 10))
    for site, tokens in places:
        some = [row for row in with_null if (by_site(row["point"])[0], row["tokens"]) == (site, tokens)]
        points = list(dict.fromkeys(row["point"] for row in some))
        x = Scale(-0.5, len(points) - 0.5, ())
        step = 1 + len(points) // 16
        found.append(
            {
                "title": re.sub(r"^layers\.?", "", site) or ", ".join(points),
                "tokens": tokens,
                "methods": {
                    method: _line([row for row in some if row["method"] == method], points, x, y)
                    for method in dict.fromkeys(row["method"] for row in some)
                },
                "null": _area(some, points, x, y, "low", "high"),
                "chance": _height(y, 0.5),
                "text": _height(y, some[0]["text_auroc"]),
                "length": _height(y, lengths[tokens]),
                "labels": [(x.at(i), _layer(point)) for i, point in enumerate(points) if i % step == 0],
                "ticks": [(100 - y.at(tick), tick) for tick in y.ticks],
            }
        )
    return found


def histogram(probabilities: np.ndarray, positive: np.ndarray) -> dict[str, Any]:
    """How many of each class have which probability: bars from 0 to 100, the highest of both having 100."""
    edges = np.linspace(0, 1, _BARS + 1)
    shares = {
        name: np.histogram(probabilities[of], edges)[0] / of.sum()
        for name, of in {"positive": positive, "negative": ~positive}.items()
    }
    tallest = max(share.max() for share in shares.values())
    return {
        "tallest": float(tallest),
        "bars": {name: (100 * share / tallest).tolist() for name, share in shares.items()},
    }


def roc(logits: np.ndarray, positive: np.ndarray, folds: np.ndarray) -> dict[str, Any]:
    """The ROC curve of each fold, and their mean at equal false positive rates; from 0 to 100."""
    curves, grid = [], np.linspace(0, 1, 101)
    for fold in np.unique(folds):
        false, true, _ = roc_curve(positive[folds == fold], logits[folds == fold], drop_intermediate=False)
        curves.append((false, true))
    mean = np.mean([np.interp(grid, *curve) for curve in curves], axis=0)
    return {"folds": [_points(*_thinned(*curve)) for curve in curves], "mean": _points(grid, mean)}


def shown(examples: Examples, job: FitJob, headline: Headline) -> list[tuple[str, list[dict[str, Any]]]]:
    """The most, the least and the wrongly certain examples, token by token."""
    chance = headline.held_out.probabilities
    certainty, right = np.abs(chance - 0.5), (chance > 0.5) == job.positive
    order = np.argsort(-certainty, kind="stable")
    kinds = {
        "Most certain, and right": order[right[order]],
        "Most certain, and wrong": order[~right[order]],
        "Least certain": order[::-1],
    }
    return [
        (
            kind,
            [
                {
                    "run": examples.runs[i],
                    "probability": float(chance[i]),
                    "tokens": _tokens(examples.runs[i], job, headline, int(i)),
                }
                for i in some[:_SHOWN]
            ],
        )
        for kind, some in kinds.items()
    ]


def _tokens(run: Example, job: FitJob, headline: Headline, number: int) -> list[Token]:
    """A run's text around the tokens that its probe reads, with the probability of each stored row."""
    fold = int(job.folds.of[number])
    choice, probe, calibration = headline.choices[fold], headline.probes[fold], headline.calibrations[fold]
    place = run.at[choice.tokens]
    first, end = max(0, place.end - _TOKENS), place.end
    stored = load(run.file, run.run_id, [choice.point], offset=run.offset)
    rows = stored[choice.point][first:end].float().numpy().astype(np.float64)
    chances = expit(calibration.slope * probe.scores(rows) + calibration.offset)
    if run.text is None or stored.text_offsets is None:
        return [
            Token(f"[{position}]", float(chance))
            for position, chance in zip(stored.positions[first:end].tolist(), chances, strict=True)
        ]
    positions = stored.positions[first:end].tolist()
    begins = [*stored.text_offsets[first:end].tolist(), place.characters]
    before = run.text[: begins[0]]
    found = [Token(("…" if len(before) > _BEFORE else "") + before[-_BEFORE:], None)] if before else []
    following = [*positions[1:], -1 if place.cut else positions[-1] + 1]
    for i, (position, chance) in enumerate(zip(positions, chances.tolist(), strict=True)):
        here = run.text[begins[i] : begins[i + 1]]
        if following[i] == position + 1:
            found.append(Token(here, chance))
        else:  # where the token ends was not stored
            found += [Token(f"[{position}]", chance), Token(here, None)]
    return found


def _line(rows: Sequence[dict[str, Any]], points: Sequence[str], x: Scale, y: Scale) -> dict[str, Any]:
    dots = [
        (x.at(points.index(row["point"])), round(100 - y.at(row["auroc"]), 2), f"{row['point']}: {row['auroc']:.3f}")
        for row in rows
    ]
    return {"dots": dots, "band": _area(rows, points, x, y, "auroc_low", "auroc_high")}


def _area(rows: Sequence[dict[str, Any]], points: Sequence[str], x: Scale, y: Scale, low: str, high: str) -> str:
    """The corners between two columns, of all methods together; empty where there is nothing."""
    if any(row[low] is None for row in rows):
        return ""
    by_point = [[row for row in rows if row["point"] == point] for point in points]
    upper = [(x.at(i), 100 - y.at(max(row[high] for row in some))) for i, some in enumerate(by_point)]
    lower = [(x.at(i), 100 - y.at(min(row[low] for row in some))) for i, some in enumerate(by_point)]
    if len(points) == 1:  # an area needs a width
        upper = [(30.0, upper[0][1]), (70.0, upper[0][1])]
        lower = [(30.0, lower[0][1]), (70.0, lower[0][1])]
    return " ".join(f"{a:.2f},{b:.2f}" for a, b in [*upper, *reversed(lower)])


def _height(y: Scale, value: float | None) -> float | None:
    return None if value is None else round(100 - y.at(value), 2)


def _layer(point: str) -> str:
    match = re.search(r"\.(\d+)\.", point)
    return match[1] if match else ""


def _thinned(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    kept = np.unique(np.linspace(0, len(x) - 1, 400).astype(int))
    return x[kept], y[kept]


def _points(x: np.ndarray, y: np.ndarray) -> str:
    return " ".join(f"{100 * a:.2f},{100 - 100 * b:.2f}" for a, b in zip(x, y, strict=True))
