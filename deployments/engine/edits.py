"""Edits: changes of activations that a request makes, and the report of their effects."""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import Literal, NamedTuple

import torch

from deployments.places.hook_site import HookSite, Point
from deployments.points.token_choices import Tokens as Tokens
from deployments.readouts.gates import Gate
from deployments.readouts.values import Readout

Kind = (
    Literal["add", "add_norm", "scale", "project_out", "clamp", "clamp_projection", "rotate", "ablate", "replace"]
    | Literal["mix", "feature"]
)
PAIRED = ("rotate", "ablate")  # kinds with two vectors v and w, concatenated along the last axis of `Edit.vector`
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
        numbers = torch.cat(self._parts).tolist() if self._parts else []
        for position, number in zip(self._positions, numbers, strict=True):
            first.setdefault(position, number)
        return list(first.values())


class Norms(_ByPosition):
    """The norms of the rows that an edit in units of the norm has changed."""

    @property
    def summary(self) -> tuple[float, int] | None:
        """Their median, the lower of two, and the number of those far above it; None without rows."""
        norms = [norm for norm in self.values if not math.isnan(norm)]
        if not norms:
            return None
        median = median_low(norms)
        return median, sum(norm >= OUTLIER * median > 0 for norm in norms)


class Report(_ByPosition):
    """The norm of each row's change, relative to the row's norm."""

    @property
    def summary(self) -> tuple[int, int, float | None, float | None]:
        """The number of changed rows and of those that the gate left unchanged; mean and largest change, if any."""
        values = self.values
        changes = [change for change in values if not math.isnan(change)]
        mean = sum(changes) / len(changes) if changes else None
        return len(changes), len(values) - len(changes), mean, max(changes, default=None)


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
        kind: The new value of a row x. `add`: x + v, with v the vector. `add_norm`: x + |x| v. `scale`: low x.
            `project_out`: x without its component along v. `clamp`: x with each entry from low to high.
            `clamp_projection`: x with x.v from low to high, for a unit vector v. `rotate`: x rotated from v to w by an
            angle with the cosine low + 1 and the sine high, for orthonormal v and w. `ablate`: x with x.v set to w.v,
            for a unit vector v. `replace`: v. `mix`: (1 - low) x + low v. `feature`: x with one feature of an
            autoencoder changed by low.
        tokens: The tokens that it changes.
        features: The entries of the last axis that it changes.
        heads: The heads that it changes, at a point of heads.
        vector: [..., features], shaped like a row of the point, in float32 or wider; [..., 2 * features] for `PAIRED`
            kinds; [tokens, ..., features], in any dtype, to replace each token's row by another. On the model's device.
        low: The first number of the kind.
        high: The second number of the kind.
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


class EditKey(NamedTuple):
    """The properties that edits of a place must share to be applied at once."""

    turn: int  # index among a sequence's edits at the place
    kind: Kind
    shape: tuple[int, ...]
    heads: Index
    features: Index
    change: FeatureChange | None
    reports: bool


Slot = tuple[HookSite, EditKey]
Signature = frozenset[Slot]


def with_slots(edits: Sequence[Edit]) -> Iterator[tuple[Slot, Edit]]:
    """Each of a sequence's edits, with its place and its key."""
    turns: Counter[HookSite] = Counter()
    for edit in edits:
        place, reports = edit.point.place, edit.report is not None
        key = EditKey(turns[place], edit.kind, edit.point.shape, edit.heads, edit.features, edit.change, reports)
        turns[place] += 1
        yield (place, key), edit


_NUMBERS = itertools.count()


class ActingEdits(NamedTuple):
    """The edits of a sequence that act on its tokens from `start` to before `stop`."""

    start: int
    stop: int
    edits: Sequence[tuple[Slot, Edit]]  # in their order
    positioned: Sequence[tuple[Slot, Edit]]  # those whose vector differs between tokens, or that collect numbers
    signature: Signature | None  # None if one of them has a gate or changes a feature of an autoencoder
    number: int  # no other object has it

    @classmethod
    def at(cls, position: int, edits: Sequence[Edit]) -> ActingEdits:
        """Those that act on the token at a position, and for how many tokens they stay the same."""
        stop = min((edit.tokens.next_bound(position) for edit in edits), default=sys.maxsize)
        acting = [(slot, edit) for slot, edit in with_slots(edits) if edit.tokens.within(position, position + 1)]
        positioned = [(slot, edit) for slot, edit in acting if edit.per_token or edit.gate or edit.report or edit.norms]
        is_static = not any(edit.gate or edit.kind == "feature" for _, edit in acting)
        slots = frozenset(slot for slot, _ in acting) if is_static else None
        return cls(position, stop, acting, positioned, union(frozenset([slots])), next(_NUMBERS))


@functools.lru_cache(maxsize=256)
def union(signatures: frozenset[Signature | None]) -> Signature | None:
    """All slots, or None if there is a None. Equal results are one object, which is found by its identity."""
    known = [slots for slots in signatures if slots is not None]
    return frozenset[Slot]().union(*known) if len(known) == len(signatures) else None
