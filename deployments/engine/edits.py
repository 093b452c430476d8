"""Edits: changes of activations that a request makes, and the report of their effects."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import Literal, NamedTuple

import torch

from deployments.places.hook_site import Point
from deployments.points.token_choices import Tokens as Tokens
from deployments.readouts.gates import Gate
from deployments.readouts.values import Readout

Kind = Literal["add", "add_norm", "scale", "project_out", "clamp", "replace", "feature"]
Index = tuple[int, ...] | None  # None for all
OUTLIER = 10  # times the median, from which on a norm is an outlier, as the first token's often is
MOST_PARTS = 512  # tensors of single rows that are kept apart; each takes far more memory than its number


class _ByPosition:
    """One number for each row of an edit; a row that runs again counts once."""

    def __init__(self) -> None:
        self._positions = list[int]()
        self._parts = list[torch.Tensor]()  # on the model's device; copied to the host once, at the end

    def add(self, positions: Sequence[int], values: torch.Tensor) -> None:
        """Add the rows' numbers, `[positions]`; NaN for a row that a gate left unchanged."""
        self._positions.extend(positions)
        self._parts.append(values)
        if len(self._parts) == MOST_PARTS:
            self._parts = [torch.cat(self._parts)]

    @property
    def values(self) -> list[float]:
        """The number of each row, in the order of positions."""
        first = dict[int, float]()
        if self._parts:
            numbers = torch.cat(self._parts).tolist()
            for position, number in zip(self._positions, numbers, strict=True):
                first.setdefault(position, number)
        return list(first.values())


class Norms(_ByPosition):
    """The norms of the rows that an edit in units of the norm has changed.

    Attributes:
        field: The edit's field in the request.
    """

    def __init__(self, field: str) -> None:
        super().__init__()
        self.field = field

    @property
    def median(self) -> float | None:
        """Their median, the lower of two; None without rows."""
        made = self._made
        return median_low(made) if made else None

    @property
    def outliers(self) -> int:
        """How many are far above the median."""
        made = self._made
        least = OUTLIER * median_low(made) if made else math.inf
        return sum(norm >= least > 0 for norm in made)

    @property
    def _made(self) -> list[float]:
        return [norm for norm in self.values if not math.isnan(norm)]


class Changed(NamedTuple):
    """The effect of an edit.

    Attributes:
        rows: The number of changed rows.
        kept: The number of rows that its gate left unchanged.
        mean: The mean norm of the changes, each relative to its row's norm; None without changes.
        largest: The largest such norm; None without changes.
    """

    rows: int
    kept: int
    mean: float | None
    largest: float | None


class Report(_ByPosition):
    """The norm of each row's change, relative to the row's norm."""

    @property
    def changed(self) -> Changed:
        """The effect so far."""
        values = self.values
        made = [change for change in values if not math.isnan(change)]
        mean = sum(made) / len(made) if made else None
        return Changed(len(made), len(values) - len(made), mean, max(made, default=None))


class FeatureChange(NamedTuple):
    """One feature of an autoencoder and its operation: `add`, `scale`, `clamp` or `zero`."""

    sae: Readout
    feature: int
    how: str


@dataclass(frozen=True, eq=False)
class Edit:
    """One change that a request makes at a point.

    Attributes:
        point: The point that it changes.
        kind: The operation: x + vector; x + |x| * vector; x * low; x without its component along vector; x clamped to
            low and high; vector instead of x; or, for `feature`, x with one feature of an autoencoder changed by low.
        tokens: The tokens that it changes.
        features: The entries of the last axis that it changes.
        heads: The heads that it changes, at a point of heads.
        vector: [..., features], shaped like a row of the point, in float32 or wider; or [tokens, ..., features], in any
            dtype, to replace each token's row by another. On the model's device.
        low: The factor, or the least value.
        high: The greatest value.
        norms: Collects |x| of the changed part of each row, for heads their mean; for kinds in units of the norm.
        change: For the kind `feature`, the feature.
        field: Its field in the request.
        gate: Selects the rows that are changed; None for all.
        report: Collects its effects; None for no report.
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
        """Whether it tracks which rows it changes."""
        return self.gate is not None or self.report is not None

    @property
    def names_rows(self) -> bool:
        """Whether it needs the positions of its rows."""
        return self.is_watched or self.norms is not None

    @property
    def per_token(self) -> bool:
        """Whether its vector differs between tokens."""
        return self.vector is not None and self.vector.ndim > len(self.point.shape)

    def rows(self, positions: Sequence[int]) -> torch.Tensor:
        """Its vector at the positions from `Tokens.within`, [tokens or 1 for all, heads or 1, features]."""
        assert self.vector is not None
        vector = self.vector[None]
        if self.per_token:
            first = self.tokens.turn(positions[0])
            vector = self.vector[first : first + len(positions)]
        heads = len(self.heads) if self.heads else math.prod(self.point.shape[:-1])
        return vector.reshape(len(vector), -1, vector.shape[-1]).expand(-1, heads, -1)
