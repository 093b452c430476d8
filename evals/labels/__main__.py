"""`python -m evals.labels`: the labels of an evaluation's recorded runs, as a Parquet file."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from deployments.command_line import parser
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
    args = command().parse_args(argv)
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


def command() -> argparse.ArgumentParser:
    """The command's options."""
    made = parser("evals.labels", "Write labels for an evaluation's recorded runs to a Parquet file.", "results/first")
    source = made.add_argument_group("evaluation, one of").add_mutually_exclusive_group(required=True)
    source.add_argument("results", metavar="RESULTS", type=Path, nargs="?", help="results directory of evals.gsm8k")
    source.add_argument("--inspect", metavar="LOG", type=Path, help="log of inspect_ai")
    source.add_argument("--lm-eval", metavar="SAMPLES", type=Path, help="samples_*.jsonl of lm_eval --log_samples")
    add = made.add_argument_group("with --lm-eval").add_argument
    add("--session", metavar="NAME", help="session of the runs")
    add("--store", metavar="DIR", type=Path, help="directory of the store (default: the server's default)")
    add("--model", metavar="NAME", help="model of the runs, if the session contains several")
    add = made.add_argument_group("output").add_argument
    add("--out", metavar="FILE", type=Path, help=f"Parquet file to write (default: {NAME} in the input's directory)")
    add("--turns", choices=["last", "all"], default="last", help="runs of a conversation with tools that get a row")
    return made


if __name__ == "__main__":
    sys.exit(main())
