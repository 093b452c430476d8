"""Monitors: the operator's readouts, read for all sequences of a forward pass that have the same ones at once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from deployments.engine.decoding.transfers import Download
from deployments.engine.request import Monitored, StopReason
from deployments.places.hook_site import HookSite
from deployments.readouts.monitors import MonitorSet
from deployments.readouts.spec import COLUMN

MOST_PARTS = 512  # arrays of single rows that are kept apart


class Watch:
    """The values of one sequence's monitors so far.

    Attributes:
        set: Its monitors.
        known: Rows before this position were read, or are read by no monitor.
        stop: Why the answer ends, once a monitor ends it.
    """

    def __init__(self, monitors: MonitorSet, prompt: int) -> None:
        self.set, self._prompt = monitors, prompt
        self.known = self._first = prompt if len(monitors.generated) == len(monitors.watched) else 0
        self.stop: StopReason | None = None
        self._parts = [np.zeros((0, len(monitors.watched)), np.float32)]

    def add(self, values: np.ndarray, may_stop: bool) -> None:
        """Add values [rows, monitors] of the next rows; with `may_stop`, one of them may end the answer."""
        if self.known < self._prompt:
            values[: self._prompt - self.known, self.set.generated] = np.nan
        self._parts.append(values)
        self.known += len(values)
        if len(self._parts) == MOST_PARTS:
            self._values()
        for i in self.set.stops if may_stop and self.stop is None else ():
            if (at := self._fired(i)) is not None:
                one, value = self.set.watched[i], float(self._values()[at - self._first, i])
                self.stop = StopReason(one.source.name, value, at, one.monitor.called)

    def results(self) -> tuple[Monitored, ...]:
        """What each monitor has read."""
        results = []
        for i, (monitor, _, _) in enumerate(self.set.watched):
            column, value, position = self._values()[:, i], None, None
            finite = np.flatnonzero(np.isfinite(column))
            if len(finite):
                extreme = np.argmax if monitor.below is None else np.argmin
                at = int(finite[extreme(column[finite])])
                value, position = float(column[at]), self._first + at
            results.append(Monitored(monitor.called, value, position, self._fired(i)))
        return tuple(results)

    def columns(self, positions: Sequence[int]) -> dict[str, torch.Tensor]:
        """Values at some positions as columns of a recorded run, float32 [positions, 1]; NaN where none was read."""
        at = np.asarray(positions) - self._first
        is_read = (at >= 0) & (at < self.known - self._first)
        found = np.full((len(self.set.watched), len(at), 1), np.nan, np.float32)
        found[:, is_read, 0] = self._values()[at[is_read]].T
        names = [f"{COLUMN}monitor.{monitor.called}" for monitor, _, _ in self.set.watched]
        return dict(zip(names, torch.from_numpy(found), strict=True))

    def _fired(self, index: int) -> int | None:
        """The position of the first row that meets a monitor's condition, with enough rows before it that meet it."""
        one = self.set.watched[index]
        met, rows = one.met(self._values()[:, index]), np.arange(self.known - self._first)
        runs = rows - np.maximum.accumulate(np.where(met, -1, rows))
        fired = np.flatnonzero(runs >= one.monitor.rows)
        return self._first + int(fired[0]) if len(fired) else None

    def _values(self) -> np.ndarray:
        """All values so far, [rows, monitors]."""
        if len(self._parts) > 1:
            self._parts = [np.concatenate(self._parts)]
        return self._parts[0]


class MonitorReader:
    """Reads the monitors of one forward pass at its `places`."""

    def __init__(self, spans: Iterable[tuple[Watch, int, int, int]]) -> None:
        """Group the sequences that run by their monitors.

        Each has the position and the row of its first token in the forward pass, and the number of its tokens.
        """
        self._groups: dict[MonitorSet, list[tuple[Watch, range]]] = {}
        for watch, start, row, count in spans:
            skipped = max(0, watch.known - start)
            if skipped < count:
                self._groups.setdefault(watch.set, []).append((watch, range(row + skipped, row + count)))
        self.places = list(dict.fromkeys(place for monitors in self._groups for place in monitors.places))
        self._values: dict[MonitorSet, torch.Tensor] = {}
        self._downloads: dict[MonitorSet, Download] = {}

    def take(self, place: HookSite, value: torch.Tensor) -> None:
        """Read a place's value [..., *row] in its final form."""
        for monitors, spans in self._groups.items():
            if place in monitors.places:
                rows = value.reshape(-1, math.prod(place.shape))
                if sum(len(of) for _, of in spans) < len(rows):
                    wanted = [row for _, of in spans for row in of]
                    rows = rows[torch.tensor(wanted, device=rows.device)]
                if monitors not in self._values:
                    shape = len(rows), len(monitors.watched)
                    self._values[monitors] = rows.new_full(shape, math.nan, dtype=torch.float32)
                monitors.read(place, rows, self._values[monitors])

    def send(self) -> None:
        """Start to copy the values to the host."""
        self._downloads = {monitors: Download({"values": values}) for monitors, values in self._values.items()}

    def keep(self) -> None:
        """Pass the values on to the sequences."""
        for monitors, download in self._downloads.items():
            values, row = download.read()["values"].copy(), 0  # [rows, monitors]; it keeps no pinned memory
            met = np.zeros(len(values), bool)
            for i in monitors.stops:
                met |= monitors.watched[i].met(values[:, i])
            for watch, of in self._groups[monitors]:
                part = slice(row, row + len(of))
                watch.add(values[part], bool(met[part].any()) if monitors.stops else False)
                row += len(of)
