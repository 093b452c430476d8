"""Conditions on readouts: which rows of a sequence have met them.

Decisions are final: a sequence that runs again after a preemption keeps the decisions of its rows. Everything stays on
the model's device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from deployments.points.readouts import AllOf, AnyOf, Condition, Not, Threshold
from deployments.points.token_choices import Tokens

if TYPE_CHECKING:
    from deployments.places.place import Place
    from deployments.readouts.values import Readout


_Met = Callable[[Sequence[int]], torch.Tensor]  # positions -> whether their rows met it


class Source(NamedTuple):
    """A readout and its place.

    Attributes:
        readout: The readout.
        place: The place that it reads.
        name: Its name in the request.
    """

    readout: Readout
    place: Place
    name: str


class ThresholdCheck:
    """A condition on one value of a readout.

    Attributes:
        source: The readout.
        column: The index of the value.
        lag: 1 if the gate acts on the row after the one read, else 0.
        here: Whether it reads the row at the edit itself, before the change; its rows are then the edited ones.
        known: Rows before this one are decided.
        stop: It reads no row from here on; None for no end.
        value: The value of the last decided row, [1].
    """

    def __init__(
        self, source: Source, column: int, spec: Threshold, tokens: Tokens, lag: int = 0, here: bool = False
    ) -> None:
        """Initialize without decided rows.

        Args:
            source: See the attribute.
            column: See the attribute.
            spec: The condition.
            tokens: The tokens that it applies to; it reads from the first one on.
            lag: See the attribute.
            here: See the attribute.
        """
        self.source, self.column, self.lag, self.here = source, column, lag, here
        self._tokens = tokens
        begin = 0 if here else tokens.first - lag
        self.known = begin
        self.stop = None if tokens.stop is None else tokens.stop - lag
        self.value: torch.Tensor | None = None
        low, high = -math.inf, math.inf
        if spec.above is not None:
            low = spec.above
        elif spec.below is not None:
            high = spec.below
        elif spec.between is not None:
            low, high = (_beside(end, way) for end, way in zip(spec.between, (-math.inf, math.inf), strict=True))
        until = math.inf if spec.until_below is None else spec.until_below
        self.limits = low, high, until, spec.ema or 0.0, float(spec.rows)
        self.remembers = spec.rows > 1 or spec.until_below is not None or bool(spec.ema)
        self._begin = begin
        self._state: torch.Tensor | None = None  # [average, open, consecutive rows]
        self._parts: list[torch.Tensor] = []  # consecutive parts: whether rows met it
        self._last = begin  # the first row of the last part

    def state(self, device: torch.device) -> torch.Tensor:
        """Its memory of earlier rows, [3]."""
        return torch.tensor([math.nan, 0.0, 0.0], device=device) if self._state is None else self._state

    def decide(self, met: torch.Tensor, state: torch.Tensor | None, values: torch.Tensor) -> None:
        """Append the decisions of the next rows.

        Args:
            met: Whether they met it, [rows].
            state: The memory after these rows.
            values: Their values, [rows].
        """
        self._last, self._state, self.value = self.known, state, values[-1:]
        self._parts.append(met)
        self.known += len(met)

    def met(self, positions: Sequence[int]) -> torch.Tensor:
        """Whether the rows at these ascending positions met it, bool [positions]."""
        first, count = positions[0] - self.lag, positions[-1] - positions[0] + 1
        if self.here:
            first, count = self._tokens.turn(positions[0]), len(positions)
        assert self._begin <= first <= first + count <= self.known, "a gate is asked of a row that was not read"
        if first < self._last:
            self._parts, self._last = [torch.cat(self._parts)], self._begin
        found = self._parts[-1][first - self._last : first - self._last + count]
        return found if count == len(positions) else found[[at - positions[0] for at in positions]]

    def turn(self, position: int) -> int:
        """The index of a token's row among its rows."""
        return self._tokens.turn(position) if self.here else position - self.lag


def _beside(number: float, way: float) -> float:
    """The next float32 in this direction."""
    return float(torch.nextafter(torch.tensor(number), torch.tensor(way)))


class CheckedValues(NamedTuple):
    """Values of consecutive rows that a check reads, `[rows]`, from position `first` on."""

    check: ThresholdCheck
    values: torch.Tensor
    first: int


def decide(reads: Sequence[CheckedValues]) -> None:
    """Let checks decide on new rows; single rows of all checks at once."""
    single, several = list[CheckedValues](), list[CheckedValues]()
    for read in reads:
        fresh = max(0, read.check.known - read.first)
        if fresh < len(read.values):
            assert read.check.known >= read.first, "a gate misses rows"
            (single if len(read.values) - fresh == 1 else several).append(read._replace(values=read.values[fresh:]))
    if single:
        values = torch.cat([read.values for read in single])  # [checks]
        limits = torch.tensor([read.check.limits for read in single], device=values.device).T
        if any(read.check.remembers for read in single):
            before = torch.stack([read.check.state(values.device) for read in single])
            met, after = _next(values, limits, before)
            states: list[torch.Tensor | None] = list(after)
        else:
            met, states = (values > limits[0]) & (values < limits[1]), [None] * len(single)
        for i, (read, state) in enumerate(zip(single, states, strict=True)):
            read.check.decide(met[i : i + 1], state if read.check.remembers else None, values[i : i + 1])
    for check, values, _ in several:
        limits = torch.tensor([check.limits], device=values.device).T
        if not check.remembers:
            check.decide((values > limits[0]) & (values < limits[1]), None, values)
            continue
        state, found = check.state(values.device)[None], list[torch.Tensor]()
        for i in range(len(values)):
            met, state = _next(values[i : i + 1], limits, state)
            found.append(met)
        check.decide(torch.cat(found), state[0], values)


def _next(values: torch.Tensor, limits: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether one row of each check [checks] meets it, and the new memory [checks, 3]; limits [5, checks]."""
    low, high, until, weight, rows = limits
    average, opened, run = state.unbind(1)
    fresh = average.isnan() | (weight == 0)
    average = torch.where(fresh, values, weight * average + (1 - weight) * values)
    is_open = ((average > low) & (average < high)) | ((opened > 0) & (average >= until))
    run = torch.where(is_open, run + 1, 0.0)
    return run >= rows, torch.stack([average, is_open.float(), run], dim=1)


class Gate:
    """A condition for one sequence.

    Attributes:
        checks: Its conditions on single values.
        lag: The largest lag of its checks.
    """

    def __init__(self, condition: Condition, check: Callable[[Threshold], ThresholdCheck]) -> None:
        """Make the checks.

        Args:
            condition: The condition in the request.
            check: Makes the check of a condition on one value.
        """
        self.checks: list[ThresholdCheck] = []
        self._tree = self._built(condition, check)
        self.lag = max(one.lag for one in self.checks)

    def _built(self, condition: Condition, check: Callable[[Threshold], ThresholdCheck]) -> _Met:
        if isinstance(condition, Threshold):
            made = check(condition)
            self.checks.append(made)
            return made.met
        if isinstance(condition, Not):
            negated = self._built(condition.negated, check)
            return lambda positions: ~negated(positions)
        parts = condition.all if isinstance(condition, AllOf) else condition.any
        inner = [self._built(part, check) for part in parts]
        combined = torch.logical_and if isinstance(condition, AllOf) else torch.logical_or

        def met(positions: Sequence[int]) -> torch.Tensor:
            found = inner[0](positions)
            for one in inner[1:]:
                found = combined(found, one(positions))
            return found

        assert isinstance(condition, AllOf | AnyOf)
        return met

    def opened(self, positions: Sequence[int]) -> torch.Tensor:
        """Whether it is open for the rows at these ascending positions, bool [positions]."""
        return self._tree(positions)

    def reason(self, position: int) -> ThresholdCheck:
        """A check that a row met when the gate was open; the first one if none suffices alone."""
        return next((check for check in self.checks if bool(check.met([position]))), self.checks[0])
