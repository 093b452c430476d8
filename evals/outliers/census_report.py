"""What a census leaves: outliers.json, and report.html, a page that needs nothing else."""

import math
from pathlib import Path
from typing import Any

from evals.report.charts import Scale, nice
from evals.report.page import NAME, template
from evals.results.results import write_json, write_whole

Record = dict[str, Any]
MIN_OPACITY = 0.15  # opacity of the smallest value of a map
MOST_ROWS = 100  # of a table of the page
MOST_NAMED = 12  # features that the screen names


def write(directory: Path, found: Record) -> None:
    """Write outliers.json and report.html, each whole or not at all.

    Args:
        directory: Where; it is made if it is missing.
        found: What `census` found.
    """
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "outliers.json", found)
    massive = found["massive"]
    context = {
        "found": found,
        "most_rows": MOST_ROWS,
        "cells": _cells(found),
        "massive_cells": None if massive["why_not"] else _cells(massive),
        "zeroed": _zeroed(found["ablation"]) if found["ablation"] else None,
    }
    write_whole(directory / NAME, template("outliers.html.jinja").render(context))


def summary(found: Record) -> str:
    """What was found, as lines of plain text."""
    named = [str(one["feature"]) for one in found["features"]]
    seen = f"{found['tokens']:,} tokens of {found['runs']:,} runs, {len(found['layers'])} layers recorded"
    lines = [seen, f"outlier features: {len(named)} of {found['width']}{_listed(named)}"]
    massive = found["massive"]
    named = [str(one["feature"]) for one in massive["features"]]
    lines.append(massive["why_not"] or f"features with massive activations: {len(named)}{_listed(named)}")
    if of := found["ablation"]:
        base, zeroed, random = (of[name]["perplexity"] for name in ("base", "outliers", "random"))
        lines.append(
            f"perplexity {base:.4g}; with outliers zeroed {zeroed:.4g}; with as many random features zeroed "
            f"{random:.4g}, {of['random']['spread']:.2g} between {len(of['drawn'])} draws"
        )
    elif found["ablation_why_not"]:
        lines.append(found["ablation_why_not"])
    return "\n".join(lines)


def _listed(names: list[str]) -> str:
    more = ", ..." if len(names) > MOST_NAMED else ""
    return f" ({', '.join(names[:MOST_NAMED])}{more})" if names else ""


def _cells(of: Record) -> list[tuple[int, int, float, float]]:
    """The squares of a map: column, row, value, and opacity by the value's logarithm."""
    shown = of["map"]["largest"]
    values = [value for row in shown for value in row if value]
    if not values:
        return []
    low, high = math.log(min(values)), math.log(max(values))

    def opacity(value: float) -> float:
        share = (math.log(value) - low) / (high - low) if high > low else 1.0
        return round(MIN_OPACITY + (1 - MIN_OPACITY) * share, 3)

    places = ((x, y, value) for y, row in enumerate(shown) for x, value in enumerate(row))
    return [(x, y, value, opacity(value)) for x, y, value in places if value]


def _zeroed(ablation: Record) -> Record:
    """The rows of the table of what zeroing costs, and the axis they are drawn on."""
    names = {"outliers": "outlier features", "random": "as many random features", "difference": "difference"}
    rows = [(name, ablation[key]) for key, name in names.items()]
    bounds = [row[f"more_nats{end}"] or 0.0 for _, row in rows for end in ("", "_low", "_high")]
    high, low = nice(max(bounds)), min(bounds)
    return {"rows": rows, "scale": Scale(-nice(-low) if low < 0 else 0.0, high, (0.0, high / 2, high))}
