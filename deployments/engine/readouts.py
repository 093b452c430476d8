"""Readouts in a forward: the values of rows, for answers, for gates, and for conditions that end an answer."""

from __future__ import annotations

import math
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from deployments.engine.gates import CheckedValues, ThresholdCheck, decide
from deployments.engine.read_values import SequenceReadouts, Values
from deployments.engine.request import Request, ResolvedReadout
from deployments.places.place import Place
from deployments.readouts.values import Readout, Stack, largest

MOST_STACKS = 64  # sets of readouts whose weights are kept side by side


@dataclass(frozen=True)
class ReadSpan:
    """A sequence's part in a forward.

    Attributes:
        request: Its request.
        readouts: Takes its values; None where it asks for none.
        start: The position of its first token that runs.
        count: How many run.
        row: The forward's row of the first.
        decides: Whether its last row decides a token.
    """

    request: Request
    readouts: SequenceReadouts | None
    start: int
    count: int
    row: int
    decides: bool


@dataclass(frozen=True)
class _Taker:
    """Who reads consecutive rows at a place: a check, or a sequence's readout of this index."""

    readout: Readout
    row: int
    first: int
    count: int
    check: ThresholdCheck | None = None
    span: ReadSpan | None = None
    index: int = 0


class Stacks:
    """The weights of linear readouts that were read together, side by side; the last ones used are kept.

    All together take no more memory than their readouts, whose `bytes` count it. A stack goes with any of its readouts.
    """

    def __init__(self) -> None:
        self._of: OrderedDict[tuple[weakref.ref[Readout], ...], Stack] = OrderedDict()
        self._lock = threading.RLock()  # readouts are freed on any thread, also within `of`

    @property
    def bytes(self) -> int:
        """Memory that all stacks take beside their readouts."""
        return sum(stack.bytes for stack in self._of.values())

    def of(self, readouts: Iterable[Readout]) -> Stack:
        """The stack of these readouts, each once."""
        used = tuple(dict.fromkeys(readouts))
        with self._lock:
            key = tuple(map(weakref.ref, used))
            if (stack := self._of.get(key)) is None:
                key = tuple(weakref.ref(one, self._drop) for one in used)
                stack = self._of[key] = Stack(used)
                known = {one for of in self._of for ref in of if (one := ref())}
                most = sum(one.bytes for one in known) // 2
                while len(self._of) > MOST_STACKS or self.bytes > most:
                    self._of.popitem(last=False)
            else:
                self._of.move_to_end(key)
            return stack

    def _drop(self, freed: weakref.ref[Readout]) -> None:
        with self._lock:
            for key in [key for key in self._of if any(ref is freed for ref in key)]:
                self._of.pop(key, None)


@dataclass
class _Found:
    """What a product gave for those who take of it: [rows, columns] on the device, and each one's part."""

    values: torch.Tensor
    features: torch.Tensor | None
    parts: list[tuple[_Taker, slice, slice]] = field(default_factory=list)


class ReadoutReader:
    """What one forward's rows give.

    Attributes:
        places: What to visit.
    """

    def __init__(self, spans: Sequence[ReadSpan], stacks: Stacks) -> None:
        """Find the readers of each place.

        Args:
            spans: The sequences that run.
            stacks: Kept from forward to forward.
        """
        self._stacks = stacks
        self._stops = [(span, span.request.stop_when) for span in spans if span.request.stop_when and span.decides]
        self._takers: dict[Place, list[_Taker]] = {}
        self._found: list[_Found] = []
        for span in spans:
            for place, taker in _takers(span):
                self._takers.setdefault(place, []).append(taker)
        self.places = list(self._takers)

    def take(self, place: Place, value: torch.Tensor) -> None:
        """Read what is wanted of a place's value [..., *row], as it goes on."""
        if place in self._takers:
            self._found += _read(self._takers[place], value.reshape(-1, math.prod(place.shape)), self._stacks)

    def read_here(self, checks: Sequence[tuple[ThresholdCheck, int, int, int]], rows: torch.Tensor) -> None:
        """Have checks read rows [rows, ...] that are about to be changed.

        Args:
            checks: With its first row among these, which of the check's that is, and how many.
            rows: The rows.
        """
        takers = [_Taker(check.source.readout, row, first, count, check) for check, row, first, count in checks]
        _read(takers, rows.flatten(1), self._stacks)

    def keep(self) -> dict[int, tuple[ThresholdCheck, int]]:
        """Hand the values out.

        Returns:
            By the row of the forward that decides a token: the condition that ends the answer before it, and the
            position of the row that met it.
        """
        for found in self._found:
            values = found.values.cpu().numpy()
            features = None if found.features is None else found.features.cpu().numpy().astype(np.int32)
            for taker, rows, columns in found.parts:
                assert taker.span
                assert taker.span.readouts
                held = Values(values[rows, columns], None if features is None else features[rows, columns])
                taker.span.readouts.add(taker.index, taker.first, held)
        ended = {}
        if self._stops:
            last = [span.start + span.count - 1 for span, _ in self._stops]
            opened = torch.cat([gate.opened([at]) for (_, gate), at in zip(self._stops, last, strict=True)]).tolist()
            for (span, gate), at, stops in zip(self._stops, last, opened, strict=True):
                if stops:
                    ended[span.row + span.count - 1] = gate.reason(at), at
        return ended


def _takers(span: ReadSpan) -> Iterable[tuple[Place, _Taker]]:
    stop = span.start + span.count
    for index, one in enumerate(span.request.readouts):
        assert span.readouts is not None
        first = max(span.start, span.readouts.known[index])
        last = min(stop, one.tokens.stop or stop)
        if first < last:
            row = span.row + first - span.start
            yield one.source.place, _Taker(one.source.readout, row, first, last - first, None, span, index)
    for gate in span.request.gates:
        for check in gate.checks:
            first, last = max(span.start, check.known), min(stop, check.stop or stop)
            if first < last and not check.here:
                row = span.row + first - span.start
                yield check.source.place, _Taker(check.source.readout, row, first, last - first, check)


def _read(takers: Sequence[_Taker], rows: torch.Tensor, stacks: Stacks) -> list[_Found]:
    """Compute on rows [rows, hidden] what takers want; checks decide at once."""
    linear = [taker for taker in takers if taker.readout.spec.kind == "linear"]
    found, reads = list[_Found](), list[CheckedValues]()
    if linear:
        found.append(_read_linear(linear, rows, stacks, reads))
    others: dict[Readout, list[_Taker]] = {}
    for taker in takers:
        if taker.readout.spec.kind != "linear":
            others.setdefault(taker.readout, []).append(taker)
    for readout, wanted in others.items():
        found += _read_features(readout, wanted, rows, reads)
    decide(reads)
    return [one for one in found if one.parts]


def _compact(takers: Sequence[_Taker], rows: torch.Tensor) -> tuple[torch.Tensor, dict[int, int]]:
    """The rows that any taker wants, and where each of the forward's rows is among them."""
    wanted = sorted({row for taker in takers for row in range(taker.row, taker.row + taker.count)})
    if len(wanted) == len(rows):
        return rows, {row: row for row in wanted}
    if wanted[-1] - wanted[0] == len(wanted) - 1:
        return rows[wanted[0] : wanted[-1] + 1], {row: i for i, row in enumerate(wanted)}
    return rows[torch.tensor(wanted, device=rows.device)], {row: i for i, row in enumerate(wanted)}


def _read_linear(takers: Sequence[_Taker], rows: torch.Tensor, stacks: Stacks, reads: list[CheckedValues]) -> _Found:
    stack = stacks.of(taker.readout for taker in takers)
    some, at = _compact(takers, rows)
    values = stack.values(some)
    found = _Found(values, None)
    for taker in takers:
        first = stack.first[taker.readout]
        rows_of = slice(at[taker.row], at[taker.row] + taker.count)
        if taker.check is None:
            found.parts.append((taker, rows_of, slice(first, first + taker.readout.count)))
        else:
            reads.append(CheckedValues(taker.check, values[rows_of, first + taker.check.column], taker.first))
    return found


def _read_features(
    readout: Readout, takers: Sequence[_Taker], rows: torch.Tensor, reads: list[CheckedValues]
) -> list[_Found]:
    """An autoencoder's features, a few rows at a time: of each row the largest, and those that checks read."""
    some, at = _compact(takers, rows)
    tops = [asked.top_k or 0 for asked in map(_asked, takers) if asked]
    most = min(max(tops, default=0), readout.count)
    columns = [taker.check.column for taker in takers if taker.check]
    values, index, read = list[torch.Tensor](), list[torch.Tensor](), list[torch.Tensor]()
    for part_of in torch.split(some, readout.rows_at_once):
        dense = readout.encode(part_of)  # [rows, features]
        if most:
            for found_of, part in zip((values, index), largest(dense, most), strict=True):
                found_of.append(part)
        if columns:
            read.append(dense[:, columns])
    if columns:
        joined, checks = torch.cat(read), [taker for taker in takers if taker.check]
        for i, taker in enumerate(checks):
            assert taker.check is not None
            rows_of = slice(at[taker.row], at[taker.row] + taker.count)
            reads.append(CheckedValues(taker.check, joined[rows_of, i], taker.first))
    if not most:
        return []
    found = _Found(torch.cat(values), torch.cat(index))
    for taker in takers:
        if asked := _asked(taker):
            rows_of = slice(at[taker.row], at[taker.row] + taker.count)
            found.parts.append((taker, rows_of, slice(0, asked.width)))
    return [found]


def _asked(taker: _Taker) -> ResolvedReadout | None:
    return taker.span.request.readouts[taker.index] if taker.span else None
