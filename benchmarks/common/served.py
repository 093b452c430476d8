"""Sending requests to a server: all at once, or one after another."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.common.children import output
from benchmarks.common.load import Exchange, Job
from benchmarks.common.measuring import Run, Way
from benchmarks.common.servers import Server
from benchmarks.common.streams import pieces

NO_FIELDS: Mapping[str, Any] = {}


@dataclass(frozen=True)
class Workload:
    """What every request asks.

    Attributes:
        texts: One prompt each.
        new_tokens: How many tokens each generates.
        at_once: How many requests are on their way at a time.
    """

    texts: Sequence[str]
    new_tokens: int
    at_once: int


def send(server: Server, asked: Workload, stream: bool, more: Mapping[str, Any] = NO_FIELDS) -> list[Exchange]:
    """Send requests from a process of their own; gives each one's answer.

    Args:
        server: Where they go.
        asked: What they ask.
        stream: Whether answers are streamed.
        more: Further fields of every body.

    Raises:
        RuntimeError: One of them was not answered with 200.
    """
    common = {"model": server.model, "max_tokens": asked.new_tokens, "temperature": 0, "stream": stream}
    bodies = [{**common, **server.extra, **more, "prompt": text} for text in asked.texts]
    return exchanged(server, "completions", bodies, asked.at_once)


def exchanged(server: Server, route: str, bodies: list[dict[str, Any]], at_once: int) -> list[Exchange]:
    """Post bodies to a route below `/v1`, so many at a time, from a process of their own and with a key of their own.

    Raises:
        RuntimeError: One of them was not answered with 200.
    """
    job = Job(f"{server.root}/v1/{route}", bodies, at_once, next(server.keys))
    command = [sys.executable, "-m", "benchmarks.common.load"]
    exchanges = [Exchange(**exchange) for exchange in json.loads(output(command, sent=json.dumps(asdict(job))))]
    for exchange in exchanges:
        if exchange.status != 200:
            raise RuntimeError(f"a request was answered with {exchange.status}: {exchange.body[:500]}")
    return exchanges


def served(
    server: Server, asked: Workload, stream: bool, name: str, note: str = "", more: Mapping[str, Any] = NO_FIELDS
) -> Way:
    """A way of generating through a server, from the first request's start to the last answer's end."""

    def run() -> Run:
        exchanges = send(server, asked, stream, more)
        read = _streamed if stream else _whole
        texts = [read(exchange) for exchange in exchanges]
        return Run(texts, len(texts) * asked.new_tokens, max(exchange.end for exchange in exchanges))

    return Way(name, run, note)


def _streamed(exchange: Exchange) -> str:
    return "".join(text for _, text in pieces(exchange))


def _whole(exchange: Exchange) -> str:
    choice: dict[str, Any] = json.loads(exchange.body.encode("latin-1"))["choices"][0]
    assert choice["finish_reason"] == "length", choice
    return str(choice["text"])


def first_token(server: Server, texts: Sequence[str]) -> list[float]:
    """Seconds from each request's start to its first text, one request after another."""
    exchanges = send(server, Workload(texts, 2, 1), stream=True)
    return [next(pieces(exchange))[0] - exchange.sent for exchange in exchanges]
