"""Timing several ways of doing the same work, in turn within one run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

Tokens = list[list[int]]


@dataclass(frozen=True)
class Run:
    """One turn of a way.

    Attributes:
        outputs: What each request generated: its tokens, or its text.
        count: What rates count: generated tokens, unless a benchmark says otherwise.
        seconds: How long that took; what is not the way's own work is left out.
    """

    outputs: Sequence[Sequence[int] | str]
    count: int
    seconds: float

    @classmethod
    def of(cls, tokens: Tokens, seconds: float) -> Run:
        """A turn that gave these tokens, all of which count."""
        return cls(tokens, sum(map(len, tokens)), seconds)

    @property
    def rate(self) -> float:
        """Counted per second."""
        return self.count / self.seconds


@dataclass(frozen=True)
class Way:
    """A named way of generating.

    Attributes:
        name: How tables call it.
        run: Generates once.
        note: How it was set, where that needs saying.
    """

    name: str
    run: Callable[[], Run]
    note: str = ""


@dataclass(frozen=True)
class Ratio:
    """A row of the table: one way's rate over another's, within each round.

    Attributes:
        of: The way's name.
        to: The base's name.
    """

    of: str
    to: str


@dataclass
class Measured:
    """The rates and outputs of one way.

    Attributes:
        rates: [rounds] counted per second, as generated tokens.
        outputs: What each request generated, in the turn before the first round.
        note: The way's.
    """

    outputs: Sequence[Sequence[int] | str]
    rates: list[float] = field(default_factory=list)
    note: str = ""

    @property
    def rate(self) -> float:
        """The median of the rounds' rates."""
        return statistics.median(self.rates)


@dataclass(frozen=True)
class Spread:
    """A median and the extremes."""

    median: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The median, the least and the largest of one value or more."""
        return cls(statistics.median(values), min(values), max(values))


def timed(work: Callable[[], Tokens], device: str = "cpu") -> Run:
    """Time something that gives each request's tokens; the device's work counts."""
    synchronize(device)
    began = time.perf_counter()
    tokens = work()
    synchronize(device)
    return Run.of(tokens, time.perf_counter() - began)


def synchronize(device: str) -> None:
    """Wait until a GPU has finished its work; return at once on a CPU."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def in_turn(
    ways: Sequence[Way], rounds: int, say: Callable[[str], None] = print, unit: str = "tokens/s"
) -> dict[str, Measured]:
    """Run every way once for nothing, then all of them in turn, every other round backwards.

    So that a machine which slows down or speeds up does so for all of them alike.

    Args:
        ways: What is measured.
        rounds: How often.
        say: Called with a line when each way is ready, and for each round.
        unit: Of rates, for these lines.
    """
    measured = {}
    for way in ways:
        first = way.run()
        measured[way.name] = Measured(first.outputs, note=way.note)
        say(f"  {way.name}: {first.rate:,.0f} {unit} at first")
    for number in range(rounds):
        for way in ways if number % 2 == 0 else reversed(ways):
            measured[way.name].rates.append(way.run().rate)
        say(f"  round {number + 1} of {rounds}")
    return measured


def ratio(measured: dict[str, Measured], wanted: Ratio) -> Spread:
    """A way's rate over its base's within each round: median, least and largest."""
    pairs = zip(measured[wanted.of].rates, measured[wanted.to].rates, strict=True)
    return Spread.of([rate / base for rate, base in pairs])


def same_outputs(measured: dict[str, Measured], name: str, reference: str) -> tuple[int, int]:
    """How many of a way's requests got what the reference's got, and how many it ran."""
    pairs = list(zip(measured[name].outputs, measured[reference].outputs, strict=False))
    return sum(mine == its for mine, its in pairs), len(pairs)


def as_json(measured: dict[str, Measured], unit: str) -> dict[str, Any]:
    """The median of each way's rates under the name of their unit, the rates of the rounds, and its note."""
    return {
        name: {unit: way.rate, "rounds": way.rates} | ({"note": way.note} if way.note else {})
        for name, way in measured.items()
    }
