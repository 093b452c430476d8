"""`python -m evals.report DIR [DIR ...]`: write report.html again, with paired differences to further evaluations."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from deployments.command_line import parser
from deployments.permissions import restrict
from evals.config import EvalError
from evals.report.comparison import compare, load_runs
from evals.report.comparison import render as side_by_side
from evals.report.page import write_report
from evals.report.screen import render


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the page of the first results directory again, and prints what is in it.

    Args:
        argv: the options; without it the process's own.

    Returns:
        0; 2 where a directory holds no finished evaluation, or they have nothing to compare.
    """
    args = command().parse_args(argv)
    first: Path = args.directories[0]
    restrict(first)
    try:
        runs = load_runs(args.directories)
        comparisons = compare(runs) if len(runs) > 1 else []
        print(side_by_side(comparisons) if comparisons else render(runs[0].summary, first))
        print(write_report(first, [(of.title, of.pairs) for of in comparisons]))
    except (EvalError, OSError) as error:
        print(f"evals.report: {error}", file=sys.stderr)
        return 2
    compared = {name for of in comparisons for name, _ in of.rows}
    for run in runs[1:]:
        if run.name not in compared:
            reason = f"it shares no condition with {runs[0].name}: it has {', '.join(run.summary['conditions'])}"
            print(f"evals.report: {run.name} is not compared: {reason}", file=sys.stderr)
    return 0


def command() -> argparse.ArgumentParser:
    """The command's options."""
    text = "Write the report of an evaluation again, with paired differences to further evaluations."
    made = parser("evals.report", text, "results/steered results/plain")
    made.add_argument("directories", metavar="DIR", nargs="+", type=Path, help="results; the report is in the first")
    return made


if __name__ == "__main__":
    sys.exit(main())
