"""The monitors of a model: the operator's readouts, and the values of theirs that are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from deployments.conditions import Monitor
from deployments.places.hook_site import HookSite
from deployments.readouts.gates import Source
from deployments.readouts.values import Readout, Stack


class Watched(NamedTuple):
    """A monitor, its readout and place, and the index of the value that it reads."""

    monitor: Monitor
    source: Source
    column: int

    def met(self, values: np.ndarray) -> np.ndarray:
        """Which values meet the condition; NaN does not."""
        above, below = self.monitor.above, self.monitor.below
        return values < below if above is None else values > above


class MonitorSet:
    """The monitors of a model's requests. Those of requests with the same object are read together.

    Attributes:
        watched: The monitors.
        places: Their places.
        stops: The indices of those that may end an answer.
        generated: The indices of those that do not read prompts.
    """

    def __init__(self, watched: Sequence[Watched]) -> None:
        self.watched = watched
        self.stops = [i for i, one in enumerate(watched) if one.monitor.do == "stop"]
        self.generated = [i for i, one in enumerate(watched) if one.monitor.tokens == "generated"]
        self._at: dict[HookSite, dict[Readout, list[int]]] = {}
        for i, one in enumerate(watched):
            self._at.setdefault(one.source.place, {}).setdefault(one.source.readout, []).append(i)
        self.places = list(self._at)
        readouts = dict.fromkeys(one.source.readout for one in watched)
        self._stacks = {one: Stack([one]) for one in readouts if one.spec.kind == "linear"}

    def read(self, place: HookSite, rows: torch.Tensor, values: torch.Tensor) -> None:
        """Write what the place's monitors read in its rows [rows, hidden] to `values` [rows, monitors]."""
        for readout, monitors in self._at[place].items():
            encode = self._stacks[readout].values if readout in self._stacks else readout.encode
            size = readout.rows_at_once
            for some, target in zip(torch.split(rows, size), torch.split(values, size), strict=True):
                dense = encode(some)
                for i in monitors:
                    target[:, i] = dense[:, self.watched[i].column]
