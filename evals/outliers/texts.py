"""The texts of stored tokens, and stored runs as prompts."""

import os
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import numpy as np

from deployments.activations.facts import RunFacts
from deployments.activations.reader.selection import Wanted, select
from deployments.activations.reader.sources import segments
from deployments.activations.segments.segments import WholeRun

Record = dict[str, Any]
Prompt = str | list[int]


def add_tokens(source: str | os.PathLike[str], session: str, places: Iterable[Record]) -> None:
    """Add to places, of `run_id` and `position`, the `token` there: its text, None where no text was kept.

    Args:
        source: The store's directory.
        session: Which session.
        places: What to add to.
    """
    by_run: dict[str, list[Record]] = {}
    for place in places:
        by_run.setdefault(place["run_id"], []).append(place)
    for run in _runs(source, session, by_run):
        offsets = dict(zip(_column(run, "position"), _column(run, "text_offset"), strict=True))
        for place in by_run[run.facts.run_id]:
            place["token"] = _token(run.facts, offsets, place["position"])


def _token(run: RunFacts, offsets: dict[int, int | None], position: int) -> str | None:
    begin = offsets[position]
    end = offsets.get(position + 1)
    if run.text is None or begin is None:
        return None
    if position + 1 == run.tokens:
        return run.text[begin:]
    return None if end is None else run.text[begin:end]


def stored_prompts(source: str | os.PathLike[str], session: str, most: int, seed: int) -> tuple[list[Prompt], int]:
    """Runs of a session as prompts: their token ids where all are stored, else the text that was kept of them.

    Args:
        source: The store's directory.
        session: Which session.
        most: Of more, as many are drawn.
        seed: Of the draw.

    Returns:
        The prompts, and how many runs have neither all tokens nor a text.
    """
    usable, without = list[str](), 0
    for run in _runs(source, session):
        usable += [run.facts.run_id] if _prompt(run) else []
        without += not _prompt(run)
    drawn = np.random.default_rng(seed).permutation(len(usable))[:most]
    chosen = [usable[i] for i in drawn]
    return [prompt for run in _runs(source, session, chosen) if (prompt := _prompt(run))], without


def _prompt(run: WholeRun) -> Prompt | None:
    if run.rows == run.facts.tokens:
        return _column(run, "token_id")
    return run.facts.text


def _runs(source: str | os.PathLike[str], session: str, runs: Collection[str] | None = None) -> Iterator[WholeRun]:
    return select(segments(source, session), Wanted(session, runs))


def _column(run: WholeRun, name: str) -> list[Any]:
    """The values of all rows; None where the file has no such column, as those of format 2."""
    if name not in run.batches[0].schema.names:
        return [None] * run.rows
    return [value for batch in run.batches for value in batch[name].to_pylist()]
