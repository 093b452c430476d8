"""Collect activations: `python -m deployments.collect DATA --model NAME --points 'layers.*.output' --session NAME`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import NoReturn

from tqdm import tqdm

from deployments.activations.facts import StoreError
from deployments.collect.collection import VARIABLE, CollectError, collect
from deployments.collect.examples import DataError, Outcome, count
from deployments.command_line import parser
from deployments.errors import RequestError
from deployments.points.token_choices import WORDS


def main(arguments: list[str] | None = None) -> int:
    """Collect, and print the result as JSON.

    Returns:
        0; 1 if examples were left out; 2 if it ended early; 130 if it was interrupted.
    """
    given = command().parse_args(arguments)
    try:
        total = count(given.data)
        with tqdm(total=total, unit=" examples", file=sys.stderr, dynamic_ncols=True) as bar:
            collected = collect(
                given.data,
                session=given.session,
                points=[name for names in given.points for name in names.replace(",", " ").split()],
                model=given.model,
                base_url=given.base_url,
                tokens=given.tokens,
                max_tokens=given.max_tokens,
                label=given.label,
                group=given.group,
                tags=[name.strip() for name in given.tags.split(",")] if given.tags is not None else None,
                on_error=given.on_error,
                store=given.store,
                actors=given.actors,
                options=dict(given.set),
                progress=partial(_show, bar, Outcome()),
                starting=lambda step: bar.write(f"deployments.collect: {step} ...", file=sys.stderr),
            )
    except (DataError, CollectError, RequestError, StoreError) as error:
        message = error.message if isinstance(error, RequestError) else error
        print(f"deployments.collect: {message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("deployments.collect: interrupted; run the same command again to continue", file=sys.stderr)
        return 130
    figures = collected._asdict().items()
    print(json.dumps({name: round(value, 1) if isinstance(value, float) else value for name, value in figures}))
    return 1 if collected.failed else 0


def _show(bar: tqdm[NoReturn], whole: Outcome, outcome: Outcome) -> None:
    """Show one more outcome and the rate of all so far, and print the examples that could not be stored."""
    for failure in outcome.failures:
        bar.write(f"deployments.collect: {failure}", file=sys.stderr)
    whole += outcome
    bar.set_postfix_str(f"{whole.tokens_per_second:,.0f} tokens/s", False)
    bar.update(outcome.runs + outcome.already_stored + len(outcome.failures))


def command() -> argparse.ArgumentParser:
    """The command's options."""
    text = "Record the activations of a file of prompts in the store. Run the same command again to continue."
    example = "prompts.jsonl --model smollm2 --points layers.12.output --session prompts"
    made = parser("deployments.collect", text, example)
    add = made.add_argument
    add("data", metavar="DATA", type=Path, help="JSONL, Parquet or CSV file with a field prompt, text or messages")
    add("--session", required=True, metavar="NAME", help="session that stores the runs")

    add = made.add_argument_group("model").add_argument
    add("--model", metavar="NAME", help="model to load; with --base-url, a served model (default: the first)")
    server = f"use this server instead of loading a model (default: ${VARIABLE}, or without --model port 8000 here)"
    add("--base-url", metavar="URL", default=os.environ.get(VARIABLE), help=f"{server}; $OPENAI_API_KEY is its key")
    add("--actors", type=int, metavar="N", help="engines to load (default: one per GPU, or per node without GPUs)")
    add("--set", action="append", default=[], type=_setting, metavar="NAME=VALUE", help="server option; repeatable")

    add = made.add_argument_group("recording").add_argument
    add("--points", nargs="+", required=True, metavar="POINT", help="hook points, such as 'layers.*.output'")
    add("--tokens", default="prompt_last", help=f"tokens to record: {WORDS}")
    add("--max-tokens", type=int, default=0, metavar="N", help="tokens to generate after each prompt, greedily")
    add("--store", metavar="DIR", help="directory or bucket URI of the store (default: the server's default)")
    text = "whether an example that cannot be stored stops the command or is skipped"
    add("--on-error", choices=("stop", "skip"), default="stop", help=text)

    add = made.add_argument_group("tags").add_argument
    add("--label", metavar="FIELD", help="field stored as the tag label (default: label)")
    add("--group", metavar="FIELD", help="field stored as the tag group (default: group)")
    add("--tags", metavar="FIELDS", help="further fields stored as tags, comma-separated (default: all)")
    return made


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError("write it as NAME=VALUE")
    return name, value


if __name__ == "__main__":
    sys.exit(main())
