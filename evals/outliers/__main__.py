"""`python -m evals.outliers --session NAME --out DIR`: writes outliers.json and report.html."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deployments.options import home
from deployments.permissions import restrict
from evals.config import EvalError
from evals.outliers import features, massive
from evals.outliers.census import Ablation, census
from evals.outliers.census_report import summary
from evals.report.page import NAME
from evals.server.answers import RequestFailed


def main(argv: Sequence[str] | None = None) -> int:
    """Looks through a session and writes what it found.

    Args:
        argv: the options; without it the process's own.

    Returns:
        0; 2 where there is nothing to look through, or the server refuses.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    if args.ablate and args.seeds < 2:
        parser.error("--seeds: give at least 2")
    if not args.ablate and args.texts:
        parser.error("--texts needs --ablate")
    restrict(args.out)
    try:
        found = census(
            args.store or home() / "activations",
            args.session,
            args.out,
            points=args.points,
            massive_points=args.massive_points,
            rule=features.Rule(args.magnitude, args.layers, args.positions),
            massive_rule=massive.Rule(args.massive_magnitude, args.massive_ratio),
            ablation=Ablation(args.base_url, args.texts, args.max_texts, args.seeds) if args.ablate else None,
        )
    except (EvalError, RequestFailed, ValueError, OSError) as error:
        print(f"evals.outliers: {error}", file=sys.stderr)
        return 2
    print(summary(found))
    print(args.out / NAME)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m evals.outliers",
        description="Find outlier features and massive activations in a stored session.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )

    def option(name: str, kind: Any, default: Any, text: str) -> None:
        parser.add_argument(name, type=kind, default=default, metavar=name[2:].upper(), help=text)

    rule, massive_rule = features.Rule(), massive.Rule()
    parser.add_argument("--session", required=True, metavar="NAME", help="the stored session")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="where to write")
    option("--store", Path, None, "the store's directory; without it $VITRINE_HOME/activations")
    option("--points", _names, None, "inputs of projections, comma separated, * for any layer; without it all stored")
    option("--magnitude", _positive, rule.magnitude, "a value counts from this magnitude on")
    option("--layers", _share, rule.layers, "the least share of recorded layers with such a value")
    option("--positions", _share, rule.positions, "the least share of token positions with such a value")
    option("--massive-points", _names, None, "the residual stream; without it all stored outputs of layers")
    option("--massive-magnitude", _positive, massive_rule.magnitude, "a massive activation is larger than this")
    ratio = "the least ratio of a massive activation to its hidden state's median magnitude"
    option("--massive-ratio", _positive, massive_rule.ratio, ratio)
    parser.add_argument(
        "--ablate",
        action="store_true",
        help="measure perplexity with outliers set to zero, with the server at this URL",
    )
    option("--base-url", str, "http://127.0.0.1:8000/v1", "the server's OpenAI root, with --ablate")
    option("--texts", Path, None, "JSON lines with text or prompt, with --ablate; without it the session's runs")
    option("--max-texts", _count, 100, "the most texts, with --ablate")
    option("--seeds", _count, 5, "draws of random features, with --ablate")
    return parser


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def _count(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


def _positive(text: str) -> float:
    if not 0 < (value := float(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not greater than 0")
    return value


def _share(text: str) -> float:
    if not 0 <= (value := float(text)) <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 to 1")
    return value


if __name__ == "__main__":
    sys.exit(main())
