"""`python -m evals.outliers --session NAME --out DIR`: writes outliers.json and report.html."""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from deployments.command_line import parser
from deployments.options import home
from deployments.permissions import restrict
from evals.config import EvalError, some
from evals.outliers.census import Record, Rule, census
from evals.report.page import NAME, template
from evals.results.results import write_json, write_whole

MIN_OPACITY = 0.15  # opacity of the smallest value of a map
MOST_ROWS = 100  # of the page's table


def main(argv: Sequence[str] | None = None) -> int:
    """Looks through a session and writes what it found.

    Args:
        argv: the options; without it the process's own.

    Returns:
        0; 2 where there is nothing to look through.
    """
    args = command().parse_args(argv)
    restrict(args.out)
    rule = Rule(args.magnitude, args.layers, args.positions)
    try:
        result = census(args.store or home() / "activations", args.session, args.points, rule)
        args.out.mkdir(parents=True, exist_ok=True)
        write_json(args.out / "outliers.json", result)
        context = {"found": result, "most_rows": MOST_ROWS, "cells": _cells(result)}
        write_whole(args.out / NAME, template("outliers.html.jinja").render(context))
    except (EvalError, ValueError, OSError) as error:
        print(f"evals.outliers: {error}", file=sys.stderr)
        return 2
    outliers = [str(outlier["feature"]) for outlier in result["features"]]
    print(f"{result['tokens']:,} tokens of {result['runs']:,} runs, {len(result['layers'])} layers recorded")
    print(f"outlier features: {len(outliers)} of {result['width']}" + (f" ({some(outliers)})" if outliers else ""))
    print(args.out / NAME)
    return 0


def command() -> argparse.ArgumentParser:
    """The command's options."""
    text = "Find outlier features in the stored activations of a session."
    made = parser("evals.outliers", text, "--session census --out outliers")
    rule, add = Rule(), made.add_argument
    add("--session", required=True, metavar="NAME", help="stored session")
    add("--out", required=True, type=Path, metavar="DIR", help="directory for outliers.json and report.html")
    add("--store", type=Path, metavar="DIR", help="directory of the store (default: $VITRINE_HOME/activations)")
    text = "inputs of projections, comma-separated; * matches every layer (default: all stored)"
    add("--points", type=_names, help=text)
    add = made.add_argument_group("rule").add_argument
    add("--magnitude", type=_positive, metavar="X", default=rule.magnitude, help="least magnitude that counts")
    text = "least share of the recorded layers with such a value"
    add("--layers", type=_share, metavar="SHARE", default=rule.layers, help=text)
    text = "least share of the token positions with such a value"
    add("--positions", type=_share, metavar="SHARE", default=rule.positions, help=text)
    return made


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def _positive(text: str) -> float:
    if not 0 < (value := float(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not greater than 0")
    return value


def _share(text: str) -> float:
    if not 0 <= (value := float(text)) <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 to 1")
    return value


def _cells(result: Record) -> list[tuple[int, int, float, float]]:
    """The squares of the map: column, row, value, and opacity by the value's logarithm."""
    shown = result["map"]["largest"]
    places = [(x, y, value) for y, row in enumerate(shown) for x, value in enumerate(row) if value]
    if not places:
        return []
    low, high = (math.log(of(value for *_, value in places)) for of in (min, max))

    def opacity(value: float) -> float:
        share = (math.log(value) - low) / (high - low) if high > low else 1.0
        return round(MIN_OPACITY + (1 - MIN_OPACITY) * share, 3)

    return [(x, y, value, opacity(value)) for x, y, value in places]


if __name__ == "__main__":
    sys.exit(main())
