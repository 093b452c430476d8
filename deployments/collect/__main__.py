"""Collect activations: `python -m deployments.collect DATA --model NAME --points 'layers.*.output' --session NAME`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from pydantic import ValidationError
from tqdm import tqdm

from deployments.activations.facts import StoreError
from deployments.collect.collecting import CollectError, collect
from deployments.collect.examples import DataError, count
from deployments.collect.outcome import Outcome
from deployments.errors import RequestError

MOST_NAMED = 20  # examples that could not be stored; more are counted


def main(arguments: list[str] | None = None) -> int:
    """Collect, and print what it came to as JSON.

    Returns:
        0; 1 where examples were left out; 2 where it ended early; 130 where it was interrupted.
    """
    given = _parser().parse_args(arguments)
    try:
        with Bar(count(given.data)) as bar:
            collected = collect(
                given.data,
                session=given.session,
                points=[name for names in given.points for name in names.split(",")],
                model=given.model,
                base_url=given.base_url,
                tokens=given.tokens,
                max_tokens=given.max_tokens,
                label=given.label,
                group=given.group,
                tags=given.tags.split(",") if given.tags is not None else None,
                on_error=given.on_error,
                store=given.store,
                actors=given.actors,
                options=dict(option.split("=", 1) for option in given.set),
                progress=bar.add,
            )
    except (DataError, CollectError, RequestError, StoreError, ValidationError) as error:
        message = error.message if isinstance(error, RequestError) else error
        print(f"deployments.collect: {message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("deployments.collect: interrupted: the same command goes on", file=sys.stderr)
        return 130
    print(json.dumps(collected._asdict()))
    return 1 if collected.failed else 0


class Bar:
    """A progress bar on stderr, with tokens per second, that names what could not be stored."""

    def __init__(self, total: int) -> None:
        self._bar = tqdm(total=total, unit=" examples", file=sys.stderr, dynamic_ncols=True)
        self._tokens = 0
        self._named = 0
        self._began: float | None = None

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._named > MOST_NAMED:
            self._bar.write(f"... and {self._named - MOST_NAMED} more", file=sys.stderr)
        self._bar.close()

    def add(self, outcome: Outcome) -> None:
        """Show what became of one more block."""
        self._tokens += outcome.tokens
        self._began = min(self._began or outcome.began, outcome.began)
        for failure in outcome.failures:
            self._named += 1
            if self._named <= MOST_NAMED:
                self._bar.write(f"deployments.collect: {failure}", file=sys.stderr)
        if outcome.tokens:
            self._bar.set_postfix_str(f"{self._tokens / max(1e-9, outcome.ended - self._began):,.0f} tokens/s", False)
        self._bar.update(outcome.runs + outcome.already_stored + len(outcome.failures))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m deployments.collect", description=__doc__)
    add = parser.add_argument
    add("data", type=Path, help="jsonl, parquet or csv, with the field prompt, text or messages in each row")
    add("--model", help="the model to load; with --base-url, one that the server serves (by default its first)")
    add("--base-url", help="ask this server in place of loading the model; OPENAI_API_KEY holds its key")
    add("--points", nargs="+", required=True, metavar="POINT", help="what to record, as 'layers.*.output'")
    add("--tokens", default="last", help="whose rows: last (default), last:K, all, prompt or generated")
    add("--session", required=True, help="the session to store the runs in")
    add("--label", metavar="FIELD", help="the field that becomes the tag label (by default the field label)")
    add("--group", metavar="FIELD", help="the field that becomes the tag group (by default the field group)")
    add("--tags", metavar="FIELDS", help="the other fields that become tags, apart by commas (by default all)")
    add("--max-tokens", type=int, default=0, metavar="N", help="tokens to generate after each prompt, greedily")
    add("--on-error", choices=("stop", "skip"), default="stop", help="what an example that cannot be stored does")
    add("--store", metavar="DIR", help="the store's directory or URI (by default the server's own default)")
    add("--actors", type=int, metavar="N", help="engines to load (by default one for each GPU, else for each node)")
    add("--set", action="append", default=[], metavar="NAME=VALUE", help="an option of the model, as of the server")
    return parser


if __name__ == "__main__":
    sys.exit(main())
