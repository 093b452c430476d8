"""Conditions on readouts: which rows of a sequence have met them.

Decisions are final: a sequence that runs again after a preemption keeps the decisions of its rows. Everything stays on
the model's device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from deployments.conditions import Condition
from deployments.points.token_choices import Tokens

if TYPE_CHECKING:
    from deployments.places.hook_site import HookSite
    from deployments.readouts.values import Readout


class Source(NamedTuple):
    """A readout, the place that it reads, and its name in the request."""

    readout: Readout
    place: HookSite
    name: str


class Gate:
    """A condition on one value of a readout, for one sequence.

    Attributes:
        source: The readout.
        column: The index of the value.
        lag: 1 if the gate acts on the row after the one read, else 0.
        here: Whether it reads the row at the edit itself, before the change; its rows are then the edited ones.
        known: Rows before this one are decided.
        stop: It reads no row from here on; None for no end.
        value: The value of the last decided row, [1].
        limits: The value must be above the first and below the second number, for a third number of rows.
    """

    def __init__(
        self, source: Source, column: int, condition: Condition, tokens: Tokens, lag: int = 0, here: bool = False
    ) -> None:
        """A gate without decided rows; it applies to `tokens`, and reads from the first one on."""
        self.source, self.column, self.lag, self.here = source, column, lag, here
        self._tokens = tokens
        self._begin = 0 if here else tokens.first - lag
        self.known = self._begin
        self.stop = None if tokens.stop is None else tokens.stop - lag
        self.value: torch.Tensor | None = None
        low = -math.inf if condition.above is None else condition.above
        high = math.inf if condition.below is None else condition.below
        self.limits = low, high, float(condition.rows)
        self._run: torch.Tensor | None = None  # the number of last rows that met the limits, [1]
        self._parts: list[torch.Tensor] = []  # consecutive parts: whether the gate is open
        self._last = self._begin  # the first row of the last part

    @property
    def counts(self) -> bool:
        """Whether it opens only after several rows."""
        return self.limits[2] > 1

    def run(self, device: torch.device) -> torch.Tensor:
        """The number of last rows that met the limits, [1]."""
        return torch.zeros(1, device=device) if self._run is None else self._run

    def decide(self, opened: torch.Tensor, run: torch.Tensor | None, values: torch.Tensor) -> None:
        """Append the decisions of the next rows, whether it is open [rows], and their values [rows].

        `run` is the number of last rows that met the limits, [1]; None if it does not count them.
        """
        self._last, self._run, self.value = self.known, run, values[-1:]
        self._parts.append(opened)
        self.known += len(opened)

    def opened(self, positions: Sequence[int]) -> torch.Tensor:
        """Whether it is open for the rows at these ascending positions, bool [positions]."""
        first, count = positions[0] - self.lag, positions[-1] - positions[0] + 1
        if self.here:
            first, count = self._tokens.turn(positions[0]), len(positions)
        assert self._begin <= first <= first + count <= self.known, "a gate is asked of a row that was not read"
        if first < self._last:
            self._parts, self._last = [torch.cat(self._parts)], self._begin
        decided = self._parts[-1][first - self._last : first - self._last + count]
        return decided if count == len(positions) else decided[[at - positions[0] for at in positions]]

    def turn(self, position: int) -> int:
        """The index of a token's row among its rows."""
        return self._tokens.turn(position) if self.here else position - self.lag


class GateValues(NamedTuple):
    """Values of consecutive rows that a gate reads, `[rows]`, from position `first` on."""

    gate: Gate
    values: torch.Tensor
    first: int


def decide(reads: Sequence[GateValues]) -> None:
    """Let gates decide on new rows; single rows of all gates at once."""
    single, several = list[GateValues](), list[GateValues]()
    for read in reads:
        fresh = max(0, read.gate.known - read.first)
        if fresh < len(read.values):
            assert read.gate.known >= read.first, "a gate misses rows"
            (single if len(read.values) - fresh == 1 else several).append(read._replace(values=read.values[fresh:]))
    if single:
        values = torch.cat([read.values for read in single])  # [gates]
        low, high, rows = torch.tensor([read.gate.limits for read in single], device=values.device).T
        opened, runs = (values > low) & (values < high), None
        if any(read.gate.counts for read in single):
            runs = torch.where(opened, torch.cat([read.gate.run(values.device) for read in single]) + 1, 0.0)
            opened = runs >= rows
        for i, (gate, _, _) in enumerate(single):
            run = runs[i : i + 1] if runs is not None and gate.counts else None
            gate.decide(opened[i : i + 1], run, values[i : i + 1])
    for gate, values, _ in several:
        low, high, rows = gate.limits
        opened, run = (values > low) & (values < high), None
        if gate.counts:
            runs = _runs(opened, gate.run(values.device))
            opened, run = runs >= rows, runs[-1:]
        gate.decide(opened, run, values)


def _runs(met: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """The number of consecutive rows up to each one that met the limits, [rows], after `before` [1] of them."""
    index = torch.arange(len(met), device=met.device, dtype=before.dtype)
    return index - torch.where(met, -1 - before, index).cummax(0).values
