"""`python -m evals.labels`: the labels of an evaluation's recorded runs, as a Parquet file."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from deployments.options import default_store
from deployments.permissions import restrict
from evals.config import EvalError
from evals.labels import inspect_log, lm_eval
from evals.labels.table import labelled

NAME = "labels.parquet"


def summary(table: pa.Table) -> str:
    """A table of labels in a few lines: what counts, what was left out, and which spans there are."""
    facts = json.loads(table.schema.metadata[b"labels"])
    groups = len(table["problem"].unique())
    left = ", ".join(f"{count} {reason}" for reason, count in facts["left_out"].items())
    names = [name for name in table.column_names if name.startswith("span.")]
    spans = ", ".join(f"{name.removeprefix('span.')} {table.num_rows - table[name].null_count}" for name in names)
    why = f" ({facts['why_no_spans']})" if facts.get("why_no_spans") else ""
    runs = f"{table.num_rows} runs of {groups} problems; labels: {', '.join(facts['labels'])}"
    return f"{runs}\nleft out: {left}\nspans: {spans}{why}"


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the labels of a results directory, or of another harness's log.

    Args:
        argv: the options; without it the process's own.

    Returns:
        0; 2 where there are none.
    """
    args = _parser().parse_args(argv)
    try:
        if args.inspect:
            table, place = inspect_log.labelled(args.inspect, turns=args.turns), args.inspect.parent
        elif args.lm_eval:
            if not args.session:
                raise EvalError("--lm-eval needs --session, the session of its runs")
            store = args.store or Path(default_store())
            table, place = lm_eval.labelled(args.lm_eval, args.session, store, args.model), args.lm_eval.parent
        else:
            table, place = labelled(args.results, turns=args.turns), args.results
        restrict(place)
        out: Path = args.out or place / NAME
        part = out.with_name(f"{out.name}.part")
        pq.write_table(table, part)
        part.replace(out)
    except (EvalError, OSError) as error:
        print(f"evals.labels: {error}", file=sys.stderr)
        return 2
    print(f"{summary(table)}\n{out}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m evals.labels",
        description="Write the labels of an evaluation's recorded runs.",
        allow_abbrev=False,
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("results", metavar="RESULTS", type=Path, nargs="?", help="a results directory of evals.gsm8k")
    source.add_argument("--inspect", metavar="LOG", type=Path, help="or a log of inspect_ai")
    source.add_argument("--lm-eval", metavar="SAMPLES", type=Path, help="or a samples_*.jsonl of lm_eval --log_samples")
    parser.add_argument("--session", help="with --lm-eval: the session of the runs")
    parser.add_argument("--store", type=Path, help="with --lm-eval: the store's directory, if not this machine's")
    parser.add_argument("--model", help="with --lm-eval: the model of the runs, where the session has several")
    parser.add_argument("--out", type=Path, help=f"the Parquet file to write (by default {NAME} beside the input)")
    parser.add_argument(
        "--turns", choices=["last", "all"], default="last", help="which runs of a conversation with tools get a row"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
