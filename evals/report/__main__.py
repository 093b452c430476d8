"""`python -m evals.report DIR [DIR ...]`: write report.html again, with paired differences to further evaluations."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from deployments.permissions import restrict
from evals.config import EvalError
from evals.report.comparison import compare, load_runs
from evals.report.comparison import render as side_by_side
from evals.report.page import finished, write_report
from evals.report.screen import render


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the page of the first results directory again, and prints what is in it.

    Args:
        argv: the options; without it the process's own.

    Returns:
        0; 2 where a directory holds no finished evaluation, or they have nothing to compare.
    """
    parser = argparse.ArgumentParser(
        prog="python -m evals.report",
        description="Write report.html again, with paired differences between variants, modes and evaluations.",
    )
    parser.add_argument("directories", metavar="DIR", nargs="+", type=Path, help="the results directory, then others")
    args = parser.parse_args(argv)
    first: Path = args.directories[0]
    restrict(first)
    try:
        found = compare(load_runs(args.directories)) if len(args.directories) > 1 else []
        print(side_by_side(found) if found else render(finished(first), first))
        print(write_report(first, [(of.title, of.pairs) for of in found]))
    except (EvalError, OSError) as error:
        print(f"evals.report: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
