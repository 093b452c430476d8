"""Streams as a client receives them: the time of each token, and which tokens arrive together."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.common.load import Exchange


def pieces(exchange: Exchange) -> Iterator[tuple[float, str]]:
    """When each event of a stream was whole, and its text, where it has any."""
    rest = ""
    for at, read in exchange.reads:
        *lines, rest = (rest + read).split("\n")
        for line in lines:
            data = line.removeprefix("data: ").strip()
            if not data or data == "[DONE]":
                continue
            event = json.loads(data.encode("latin-1"))
            if "choices" not in event:
                raise RuntimeError(f"a stream ended with {event}")
            for choice in event["choices"]:
                if choice.get("text"):
                    yield at, choice["text"]


@dataclass(frozen=True)
class Gaps:
    """How a stream's tokens came.

    Attributes:
        median: Seconds from one arrival of new tokens to the next.
        p99: The same.
        tokens: Tokens per arrival, on average.
        most: The most tokens that came at once.
        events: Events per token.
    """

    median: float
    p99: float
    tokens: float
    most: int
    events: float


def gaps(exchanges: Sequence[Exchange], steps: Sequence[Sequence[str]]) -> Gaps:
    """The gaps between a stream's arrivals, and how many tokens came in each.

    Args:
        exchanges: Streamed answers.
        steps: Each one's text, token by token, as the engine gave it.
    """
    between, at_once, events = list[float](), list[int](), 0
    for exchange, texts in zip(exchanges, steps, strict=True):
        arrivals = Counter[float]()
        length, token, behind = 0, 0, 0
        for at, text in pieces(exchange):
            length, events = length + len(text), events + 1
            while token < len(texts) and behind + len(texts[token]) <= length:
                behind += len(texts[token])
                token += 1
                arrivals[at] += 1
        at_once += arrivals.values()
        times = list(arrivals)
        between += [later - earlier for earlier, later in zip(times, times[1:], strict=False)]
    between.sort()
    return Gaps(
        statistics.median(between),
        between[round(0.99 * (len(between) - 1))],
        statistics.mean(at_once),
        max(at_once),
        events / sum(map(len, steps)),
    )
