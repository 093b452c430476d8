"""report.html of a sweep: one page without scripts that needs nothing else."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from evals.probes.examples import Examples, by_site
from evals.report.charts import Scale
from evals.report.page import NAME, template
from evals.results.results import write_whole

_SHOWN = 10  # examples that the probe has wrong
_CHARACTERS = 300  # of their texts

Record = dict[str, Any]


def write(out: Path, document: Record, examples: Examples) -> None:
    """Write the page, whole or not at all.

    Args:
        out: The directory.
        document: As `probes.json` has it.
        examples: The examples.
    """
    context = {
        "d": document,
        "h": document["headline"],
        "panels": panels(document["rows"]),
        "wrong": _wrong(document, examples),
    }
    write_whole(out / NAME, template("probes.html.jinja").render(context))


def panels(rows: Sequence[Record]) -> list[Record]:
    """A chart for each site and choice of tokens: AUROC by layer, from 0 to 100 on both axes."""
    charts = []
    drawn = [row[name] for row in rows for name in ("auroc", "auroc_low", "control_low", "text_auroc", "length_auroc")]
    low = min(0.4, np.floor(10 * min(value for value in drawn if value is not None)) / 10)
    y = Scale(low, 1.0, tuple(np.arange(round(10 * low), 11, 2 if low < 0.3 else 1) / 10))
    for site, tokens in dict.fromkeys((by_site(row["point"])[0], row["tokens"]) for row in rows):
        some = [row for row in rows if (by_site(row["point"])[0], row["tokens"]) == (site, tokens)]
        points = list(dict.fromkeys(row["point"] for row in some))
        x = Scale(-0.5, len(points) - 0.5, ())
        step = 1 + len(points) // 16
        methods = {}
        for method in dict.fromkeys(row["method"] for row in some):
            own = [row for row in some if row["method"] == method]
            dots = [
                (x.at(i), _height(y, row["auroc"]), f"{row['point']}: {row['auroc']:.3f}") for i, row in enumerate(own)
            ]
            methods[method] = {"dots": dots, "band": _area(own, points, x, y, "auroc_low", "auroc_high")}
        charts.append(
            {
                "title": re.sub(r"^layers\.?", "", site) or ", ".join(points),
                "tokens": tokens,
                "methods": methods,
                "null": _area(some, points, x, y, "control_low", "control_high"),
                "chance": _height(y, 0.5),
                "text": _height(y, some[0]["text_auroc"]),
                "length": _height(y, some[0]["length_auroc"]),
                "labels": [(x.at(i), _layer(point)) for i, point in enumerate(points) if i % step == 0],
                "ticks": [(100 - y.at(tick), tick) for tick in y.ticks],
            }
        )
    return charts


def _area(rows: Sequence[Record], points: Sequence[str], x: Scale, y: Scale, low: str, high: str) -> str:
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


def _wrong(document: Record, examples: Examples) -> list[Record]:
    """The examples of whose wrong class the probe is most certain, each with the end of its text."""
    texts = {run.run_id: (run.text or "")[-_CHARACTERS:] for run in examples.runs}
    wrong = [
        score
        for score in document["scores"]
        if (score["probability"] > 0.5) != (score["label"] == document["positive"])
    ]
    wrong.sort(key=lambda score: -abs(score["probability"] - 0.5))
    return [score | {"text": texts[score["run_id"]]} for score in wrong[:_SHOWN]]
