"""`python -m evals.compare A B [C ...]`: results directories side by side, paired where they share problems."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evals.compare.comparison import Comparison, Run, compare, differing, load_runs
from evals.config import EvalError
from evals.gsm8k.screen import COUNTED, aligned, chances, columns, heads, interval, number, points
from evals.report.charts import SHARES, around_zero
from evals.report.page import template
from evals.results.results import write_whole
from evals.scoring import RULES

OWN_RULES_NOTE = "outcomes and rewards are by each evaluation's own rule: --resume --rule scores one anew by another"
MAX_WIDTH = 48  # characters of a setting on the screen


def main(argv: Sequence[str] | None = None) -> int:
    """Compares evaluations on the screen, and in a page where one is asked for.

    Args:
        argv: the options; without it the process's own.

    Returns:
        0; 2 where a directory holds no finished evaluation, or they have nothing to compare.
    """
    parser = argparse.ArgumentParser(
        prog="python -m evals.compare", description="Compare evaluations with the first one.", allow_abbrev=False
    )
    parser.add_argument("directories", metavar="DIR", nargs="+", type=Path, help="results directories, two or more")
    parser.add_argument("--html", type=Path, help="also write a self-contained page")
    args = parser.parse_args(argv)
    if len(args.directories) < 2:
        parser.error("give at least two results directories")
    try:
        runs = load_runs(args.directories)
        found = compare(runs)
        print(render(runs, found))
        if args.html:
            write_page(args.html, runs, found)
            print(f"\n{args.html}")
    except (EvalError, OSError) as error:
        print(f"evals.compare: {error}", file=sys.stderr)
        return 2
    return 0


def render(runs: Sequence[Run], found: Sequence[Comparison]) -> str:
    """The comparison as aligned plain text."""
    lines = [aligned([[run.name, *_about(run)] for run in runs])]
    for of in found:
        lines += ["", f"{of.title}", "", _conditions(of)]
        if pairs := [_difference(*pair) for pair in of.paired]:
            lines += ["", aligned(pairs)]
    if len({run.summary["rule"] for run in runs}) > 1:
        lines += ["", OWN_RULES_NOTE]
    if settings := differing(runs):
        lines += ["", "what differs in their configs", ""]
        lines += [line for name, values in settings for line in _setting(runs, name, values)]
    else:
        lines += ["", "their configs are the same"]
    return "\n".join(lines)


def write_page(path: Path, runs: Sequence[Run], found: Sequence[Comparison]) -> None:
    """Writes the comparison as a page, whole or not at all."""
    bounds = [bound for of in found for _, _, pair in of.paired for bound in pair["ci95"] or ()]
    rewards = dict.fromkeys(name for of in found for _, condition in of.rows for name in condition["rewards"])
    context = {
        "runs": runs,
        "found": found,
        "rules": RULES,
        "kinds": COUNTED,
        "settings": differing(runs),
        "of_each": OWN_RULES_NOTE if len({run.summary["rule"] for run in runs}) > 1 else None,
        "rewards": list(rewards),
        "shares": SHARES,
        "scale": around_zero(bounds),
    }
    write_whole(path, template("compare.html.jinja").render(context))


def _about(run: Run) -> list[str]:
    counts, ended = run.summary["counts"], "not complete" if run.summary["incomplete"] else ""
    return [run.summary["model"], run.summary["dataset"], f"{counts['problems']} problems", ended]


def _conditions(of: Comparison) -> str:
    rewards = list(dict.fromkeys(name for _, condition in of.rows for name in condition["rewards"]))
    rows = [["", *heads(of.rule), "tokens/s", *rewards, "reward"]]
    for name, c in of.rows:
        row = [name, *columns(c, of.rule)]
        row += [number(of.speeds[name], ".0f"), *(number(c["rewards"].get(reward), ".3f") for reward in rewards)]
        rows.append([*row, number(c["reward"], ".3f")])
    return aligned(rows)


def _difference(a: str, b: str, pair: dict[str, Any]) -> list[str]:
    if pair["difference"] is None:
        return [f"{b} less {a}", "they share no answered problem", "", "", ""]
    alone = f"{pair['only_b']} right in {b} alone, {pair['only_a']} in {a} alone"
    bounds, chance = f"95% interval {interval(pair['ci95'], points)}", chances(pair)
    return [
        f"{b} less {a}",
        f"{points(pair['difference'])} points",
        bounds,
        chance,
        f"{pair['problems']} problems, {alone}",
    ]


def _setting(runs: Sequence[Run], name: str, values: Sequence[str]) -> list[str]:
    lines = [f"  {name}"]
    width = max(len(run.name) for run in runs)
    for run, value in zip(runs, values, strict=True):
        text = " ".join(value.split())
        lines.append(
            f"    {run.name.ljust(width)}  {text if len(text) <= MAX_WIDTH else text[: MAX_WIDTH - 3] + '...'}"
        )
    return lines


if __name__ == "__main__":
    sys.exit(main())
