"""What the charts of a page show, as places from 0 to 100; the templates draw them."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

ROUND = (1, 1.2, 1.6, 2, 2.4, 3, 4, 5, 6, 8, 10)  # times a power of ten


@dataclass(frozen=True)
class Scale:
    """An axis: its ends, and where lines are drawn."""

    low: float
    high: float
    ticks: tuple[float, ...]

    def at(self, value: float) -> float:
        """Where a value stands, from 0 to 100."""
        return round(100 * min(1.0, max(0.0, (value - self.low) / (self.high - self.low))), 3)


SHARES = Scale(0.0, 1.0, (0.0, 0.25, 0.5, 0.75, 1.0))


def around_zero(values: Iterable[float]) -> Scale:
    """The axis of differences: as far to both sides, in steps that people count in."""
    most = nice(max((abs(value) for value in values), default=0.0) or 0.05)
    return Scale(-most, most, (-most, -most / 2, 0.0, most / 2, most))


def nice(value: float) -> float:
    """A round number, not below the value; 1 for 0."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in ROUND if step * power >= value * (1 - 1e-9))


def stacked(counts: dict[str, int]) -> list[tuple[str, float, float]]:
    """Kinds one beside the other: name, where it begins, how wide it is; from 0 to 100."""
    total, at, parts = sum(counts.values()) or 1, 0.0, []
    for kind, count in counts.items():
        width = 100 * count / total
        if count:
            parts.append((kind, round(at, 3), round(width, 3)))
        at += width
    return parts
