"""Readouts in a forward pass: the values of rows for answers, gates and stop conditions."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from deployments.places.hook_site import HookSite
from deployments.readouts.gates import Gate, GateValues, decide
from deployments.readouts.sequence import ResolvedReadout, SequenceReadouts, Values
from deployments.readouts.values import Readout, Stack, largest

MOST_STACKS = 64  # sets of readouts whose concatenated weights are kept
MOST_STACK_BYTES = 256 << 20  # of all these weights; the set used last is kept even if it is larger


@dataclass(frozen=True)
class ReadSpan:
    """The rows of one sequence in a forward pass."""

    readouts: SequenceReadouts | None  # collects the values that its request asks for
    gates: Sequence[Gate]  # the conditions of its edits, and `stop_when`
    stop_when: Gate | None  # the condition that ends its answer
    start: int  # the position of its first token that runs
    count: int  # of tokens that run
    row: int  # the first token's in the forward pass
    decides: bool  # whether its last row predicts the next token


@dataclass(frozen=True)
class _Consumer:
    """A consumer of consecutive rows at a place: a gate, or a sequence's readout with this index."""

    readout: Readout
    row: int
    first: int
    count: int
    gate: Gate | None = None
    readouts: SequenceReadouts | None = None
    index: int = 0


class Stacks:
    """Concatenated weights of linear readouts that are read together; the most recent ones are kept."""

    def __init__(self) -> None:
        self._of: OrderedDict[tuple[Readout, ...], Stack] = OrderedDict()

    @property
    def bytes(self) -> int:
        """Memory of the concatenated weights."""
        return sum(stack.bytes for stack in self._of.values())

    def of(self, readouts: Iterable[Readout]) -> Stack:
        """The stack of these readouts, without repetition."""
        key = tuple(dict.fromkeys(readouts))
        if key not in self._of:
            self._of[key] = Stack(key)
            while len(self._of) > MOST_STACKS or (len(self._of) > 1 and self.bytes > MOST_STACK_BYTES):
                self._of.popitem(last=False)
        self._of.move_to_end(key)
        return self._of[key]


@dataclass
class _Product:
    """The result of one product: [rows, columns] on the device, and the part for each consumer."""

    values: torch.Tensor
    features: torch.Tensor | None
    parts: list[tuple[_Consumer, slice, slice]] = field(default_factory=list)


class ReadoutReader:
    """Reads the readouts of one forward pass at its `places`."""

    def __init__(self, spans: Sequence[ReadSpan], stacks: Stacks) -> None:
        """Group the consumers of the sequences that run by place; `stacks` are kept between forward passes."""
        self._stacks = stacks
        self._stops = [(span, span.stop_when) for span in spans if span.stop_when and span.decides]
        self._consumers: dict[HookSite, list[_Consumer]] = {}
        self._products: list[_Product] = []
        for span in spans:
            for place, consumer in _consumers(span):
                self._consumers.setdefault(place, []).append(consumer)
        self.places = list(self._consumers)

    def take(self, place: HookSite, value: torch.Tensor) -> None:
        """Read a place's value [..., *row] in its final form."""
        if place in self._consumers:
            self._products += _read(self._consumers[place], value.reshape(-1, math.prod(place.shape)), self._stacks)

    def read_here(self, gates: Sequence[tuple[Gate, int, int, int]], rows: torch.Tensor) -> None:
        """Let gates read rows [rows, ...] that are about to be changed.

        With each gate come the index of its first row in `rows`, that row's index in the gate, and the row count.
        """
        consumers = [_Consumer(gate.source.readout, row, first, count, gate) for gate, row, first, count in gates]
        _read(consumers, rows.flatten(1), self._stacks)

    def keep(self) -> dict[int, tuple[str, float, int]]:
        """Pass the values on to the sequences.

        Returns:
            For each row that meets the condition that ends its answer: the readout, its value, and the row's position.
        """
        for product in self._products:
            values = product.values.cpu().numpy()
            features = None if product.features is None else product.features.cpu().numpy().astype(np.int32)
            for consumer, rows, columns in product.parts:
                assert consumer.readouts
                held = Values(values[rows, columns], None if features is None else features[rows, columns])
                consumer.readouts.add(consumer.index, consumer.first, held)
        ended = {}
        if self._stops:
            last = [span.start + span.count - 1 for span, _ in self._stops]
            opened = torch.cat([gate.opened([at]) for (_, gate), at in zip(self._stops, last, strict=True)]).tolist()
            for (span, gate), at, stops in zip(self._stops, last, opened, strict=True):
                if stops:
                    assert gate.value is not None
                    ended[span.row + span.count - 1] = gate.source.name, float(gate.value), at
        return ended


def _consumers(span: ReadSpan) -> Iterable[tuple[HookSite, _Consumer]]:
    stop = span.start + span.count
    readouts = span.readouts
    for index, (source, tokens, _) in enumerate(readouts.asked if readouts else ()):
        assert readouts
        first = max(span.start, readouts.known[index])
        last = min(stop, tokens.stop or stop)
        if first < last:
            row = span.row + first - span.start
            yield source.place, _Consumer(source.readout, row, first, last - first, None, readouts, index)
    for gate in span.gates:
        first, last = max(span.start, gate.known), min(stop, gate.stop or stop)
        if first < last and not gate.here:
            row = span.row + first - span.start
            yield gate.source.place, _Consumer(gate.source.readout, row, first, last - first, gate)


def _read(consumers: Sequence[_Consumer], rows: torch.Tensor, stacks: Stacks) -> list[_Product]:
    """Compute the consumers' readouts of rows [rows, hidden]; gates decide at once."""
    linear = [consumer for consumer in consumers if consumer.readout.spec.kind == "linear"]
    products, reads = list[_Product](), list[GateValues]()
    if linear:
        products.append(_read_linear(linear, rows, stacks, reads))
    others: dict[Readout, list[_Consumer]] = {}
    for consumer in consumers:
        if consumer.readout.spec.kind != "linear":
            others.setdefault(consumer.readout, []).append(consumer)
    for readout, wanted in others.items():
        products += _read_features(readout, wanted, rows, reads)
    decide(reads)
    return [product for product in products if product.parts]


def _compact(consumers: Sequence[_Consumer], rows: torch.Tensor) -> tuple[torch.Tensor, list[slice]]:
    """The rows that any consumer needs, and where among them each consumer's lie."""
    wanted = sorted({row for consumer in consumers for row in range(consumer.row, consumer.row + consumer.count)})
    index = {row: i for i, row in enumerate(wanted)}
    firsts = [index[consumer.row] for consumer in consumers]
    slices = [slice(first, first + consumer.count) for first, consumer in zip(firsts, consumers, strict=True)]
    if wanted[-1] - wanted[0] == len(wanted) - 1:
        return rows[wanted[0] : wanted[-1] + 1], slices
    return rows[torch.tensor(wanted, device=rows.device)], slices


def _read_linear(
    consumers: Sequence[_Consumer], rows: torch.Tensor, stacks: Stacks, reads: list[GateValues]
) -> _Product:
    stack = stacks.of(consumer.readout for consumer in consumers)
    some, slices = _compact(consumers, rows)
    values = stack.values(some)
    product = _Product(values, None)
    for consumer, rows_of in zip(consumers, slices, strict=True):
        first = stack.first[consumer.readout]
        if consumer.gate is None:
            product.parts.append((consumer, rows_of, slice(first, first + consumer.readout.count)))
        else:
            reads.append(GateValues(consumer.gate, values[rows_of, first + consumer.gate.column], consumer.first))
    return product


def _read_features(
    readout: Readout, consumers: Sequence[_Consumer], rows: torch.Tensor, reads: list[GateValues]
) -> list[_Product]:
    """An autoencoder's features, a few rows at a time: the largest of each row, and those that gates read."""
    some, slices = _compact(consumers, rows)
    tops = [asked.top_k or 0 for asked in map(_asked, consumers) if asked]
    most = min(max(tops, default=0), readout.count)
    gated = [(consumer, consumer.gate, of) for consumer, of in zip(consumers, slices, strict=True) if consumer.gate]
    columns = [gate.column for _, gate, _ in gated]
    values, index, read = list[torch.Tensor](), list[torch.Tensor](), list[torch.Tensor]()
    for part_of in torch.split(some, readout.rows_at_once):
        dense = readout.encode(part_of)  # [rows, features]
        if most:
            for found_of, part in zip((values, index), largest(dense, most), strict=True):
                found_of.append(part)
        if columns:
            read.append(dense[:, columns])
    if columns:
        joined = torch.cat(read)
        reads += [GateValues(gate, joined[of, i], consumer.first) for i, (consumer, gate, of) in enumerate(gated)]
    if not most:
        return []
    product = _Product(torch.cat(values), torch.cat(index))
    for consumer, rows_of in zip(consumers, slices, strict=True):
        if asked := _asked(consumer):
            product.parts.append((consumer, rows_of, slice(0, asked.width)))
    return [product]


def _asked(consumer: _Consumer) -> ResolvedReadout | None:
    return consumer.readouts.asked[consumer.index] if consumer.readouts else None
