"""Edits: changes of activations that a request makes, and what is reported of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import Literal, NamedTuple

import torch

from deployments.engine.gates import Gate
from deployments.places.place import Point
from deployments.points.token_choices import Tokens as Tokens
from deployments.readouts.values import Readout

Kind = Literal["add", "add_norm", "scale", "project_out", "clamp", "replace", "feature"]
Index = tuple[int, ...] | None  # None for all
MOST_PARTS = 512  # tensors of single rows that are held apart, each of which takes far more than its number


class _ByPosition:
    """A number of each row that an edit has come to, as they gather; a row that is run again counts once."""

    def __init__(self) -> None:
        self._positions = list[int]()
        self._parts = list[torch.Tensor]()  # on the model's device: they are read once, at the end

    def add(self, positions: Sequence[int], values: torch.Tensor) -> None:
        """Take rows' numbers, `[positions]`; NaN of one that a gate kept as it was."""
        self._positions.extend(positions)
        self._parts.append(values)
        if len(self._parts) == MOST_PARTS:
            self._parts = [torch.cat(self._parts)]

    @property
    def values(self) -> list[float]:
        """The number of each row."""
        first = dict[int, float]()
        if self._parts:
            numbers = torch.cat(self._parts).tolist()
            for position, number in zip(self._positions, numbers, strict=True):
                first.setdefault(position, number)
        return list(first.values())


class Norms(_ByPosition):
    """The norms of the rows that an edit in their units has changed.

    Attributes:
        field: What the request calls the edit.
    """

    def __init__(self, field: str) -> None:
        super().__init__()
        self.field = field

    @property
    def median(self) -> float | None:
        """Their median, of an even number the lower one; None of none. The first token's may be a hundred times it."""
        made = [norm for norm in self.values if not math.isnan(norm)]
        return median_low(made) if made else None


class Changed(NamedTuple):
    """What an edit did.

    Attributes:
        rows: How many rows it changed.
        kept: How many its gate kept as they were.
        mean: Of the norms of its changes, each relative to its row's; None of none.
        largest: The largest of them, likewise.
    """

    rows: int
    kept: int
    mean: float | None
    largest: float | None


class Report(_ByPosition):
    """What an edit does: the norm of each row's change, relative to the row's."""

    @property
    def changed(self) -> Changed:
        """What it did."""
        values = self.values
        made = [change for change in values if not math.isnan(change)]
        mean = sum(made) / len(made) if made else None
        return Changed(len(made), len(values) - len(made), mean, max(made, default=None))


class FeatureChange(NamedTuple):
    """One feature of an autoencoder, and what becomes of it: `add`, `scale`, `clamp` or `zero`."""

    sae: Readout
    feature: int
    how: str


@dataclass(frozen=True, eq=False)
class Edit:
    """One change that a request makes at a point.

    Attributes:
        point: Where.
        kind: x + vector; x + |x| * vector; x * low; x without its part along vector; x between low and high; or vector
            in its place; of `feature`, x with one feature of an autoencoder changed by low.
        tokens: Of which tokens.
        features: Which entries of the last axis.
        heads: Which heads, at a point of heads.
        vector: [..., features] as a row of the point, in float32 or wider; or [tokens, ..., features], in any dtype, to
            replace each token's by another. On the model's device.
        low: The factor, or the least value.
        high: The greatest value.
        norms: Takes each |x|, the norm of what is changed of a row, of heads their mean; where the kind has it.
        change: Of the kind `feature`, which one.
        field: What the request calls it.
        gate: Which rows are changed; None for all.
        report: Takes what it does; None for nothing.
    """

    point: Point
    kind: Kind
    tokens: Tokens = field(default_factory=Tokens)
    features: Index = None
    heads: Index = None
    vector: torch.Tensor | None = None
    low: float = 0.0
    high: float = 0.0
    norms: Norms | None = None
    change: FeatureChange | None = None
    field: str = ""
    gate: Gate | None = None
    report: Report | None = None

    @property
    def is_watched(self) -> bool:
        """Whether it must be known which rows it changes."""
        return self.gate is not None or self.report is not None

    @property
    def names_rows(self) -> bool:
        """Whether it must be known at which positions it is made."""
        return self.is_watched or self.norms is not None

    @property
    def per_token(self) -> bool:
        """Whether its vector is another for each token."""
        return self.vector is not None and self.vector.ndim > len(self.point.shape)

    def rows(self, positions: Sequence[int]) -> torch.Tensor:
        """What its vector is at some tokens that `Tokens.within` gave, [tokens or 1 for all, heads or 1, features]."""
        assert self.vector is not None
        vector = self.vector[None]
        if self.per_token:
            first = self.tokens.turn(positions[0])
            vector = self.vector[first : first + len(positions)]
        heads = len(self.heads) if self.heads else math.prod(self.point.shape[:-1])
        return vector.reshape(len(vector), -1, vector.shape[-1]).expand(-1, heads, -1)
