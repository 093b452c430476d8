"""What the charts of a page show, as places from 0 to 100; the templates draw them."""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq

BINS = 24
BATCH = 8192  # rows
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


@dataclass(frozen=True)
class Histogram:
    """How often a number of the samples of each condition lies between two others.

    Attributes:
        high: the end of the last bin; each is as wide, and the first begins at 0.
        beyond: whether larger ones are in the last bin, too.
        bars: by condition, the height of each bin from 0 to 100, the highest of all conditions having 100.
        tallest: the share of a condition's samples that is 100.
    """

    high: float
    beyond: bool
    bars: dict[str, list[float]]
    tallest: float


def histogram(directory: Path, column: str, usual: float, conditions: Collection[str]) -> Histogram:
    """Counts a column of samples.parquet, batch by batch.

    Args:
        directory: the results.
        column: of numbers from 0 on.
        usual: what most samples lie below: far above it is the last bin.
        conditions: that are shown.
    """
    most = max((float(values.max()) for _, values in _batches(directory, column, conditions)), default=0.0)
    high = nice(min(most, 2 * usual) or 1.0)
    counts: dict[str, np.ndarray] = {}
    for keys, values in _batches(directory, column, conditions):
        bins = np.minimum((values / high * BINS).astype(np.int64), BINS - 1)
        for key in np.unique(keys):
            counts.setdefault(key, np.zeros(BINS, dtype=np.int64))
            counts[key] += np.bincount(bins[keys == key], minlength=BINS)
    shares = {key: count / count.sum() for key, count in counts.items()}
    tallest = max((float(share.max()) for share in shares.values()), default=1.0)
    bars = {key: [round(100 * float(bar) / tallest, 2) for bar in share] for key, share in shares.items()}
    return Histogram(high, most > high, bars, tallest)


def _batches(directory: Path, column: str, conditions: Collection[str]) -> Iterable[tuple[np.ndarray, np.ndarray]]:
    with pq.ParquetFile(directory / "samples.parquet") as file:
        for batch in file.iter_batches(batch_size=BATCH, columns=["mode", "variant", "outcome", column]):
            batch = batch.filter(pc.and_(pc.not_equal(batch["outcome"], "failed"), pc.greater(batch[column], 0)))
            names = zip(batch["mode"].to_pylist(), batch["variant"].to_pylist(), strict=True)
            keys = np.array([f"{mode}.{variant}" for mode, variant in names])
            shown = np.isin(keys, list(conditions))
            if shown.any():
                yield keys[shown], batch[column].to_numpy(zero_copy_only=False).astype(np.float64)[shown]


def stacked(counts: dict[str, int]) -> list[tuple[str, float, float]]:
    """Kinds one beside the other: name, where it begins, how wide it is; from 0 to 100."""
    total, at, found = sum(counts.values()) or 1, 0.0, []
    for kind, count in counts.items():
        width = 100 * count / total
        if count:
            found.append((kind, round(at, 3), round(width, 3)))
        at += width
    return found


def lines(points: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The norms of one site by layer: of all runs with a deviation to both sides, of right answers and of others."""
    layers = [point["layer"] for point in points]
    tops = [(point["mean_norm"] or 0.0) + (point["std_norm"] or 0.0) for point in points]
    high = nice(max(tops, default=0.0))
    first, last = layers[0], layers[-1]
    x = Scale(first - 0.5, last + 0.5, tuple(map(float, layers)))
    y = Scale(0.0, high, (0.0, high / 2, high))

    def line(of: Sequence[dict[str, Any]]) -> list[tuple[float, float]]:
        norms = [(layer, one["mean_norm"]) for layer, one in zip(layers, of, strict=True)]
        return [(x.at(layer), round(100 - y.at(norm), 3)) for layer, norm in norms if norm is not None]

    whiskers = [
        (x.at(p["layer"]), 100 - y.at(p["mean_norm"] - p["std_norm"]), 100 - y.at(p["mean_norm"] + p["std_norm"]))
        for p in points
        if p["mean_norm"] is not None
    ]
    groups = {group: line([point["by_outcome"][group] for point in points]) for group in ("correct", "other")}
    labels = [(x.at(layer), layer) for layer in layers[:: 1 + len(layers) // 10]]
    return {"lines": groups, "whiskers": whiskers, "high": high, "labels": labels}
