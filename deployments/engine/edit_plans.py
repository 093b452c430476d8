"""Edits in a forward pass: one operation of each kind at a place, for all sequences that request it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from deployments.engine.edits import PAIRED, ActingEdits, Edit, EditKey, Norms, Report, Signature, union, with_slots
from deployments.engine.scheduler import Chunk
from deployments.model.batch import uploaded
from deployments.places.hook_site import HookSite
from deployments.readouts.reading import ReadoutReader


@dataclass
class _Part:
    """One sequence's edit of some of the tokens in a forward pass."""

    edit: Edit
    positions: Sequence[int]
    row: int  # of the first position


class Plan:
    """The changes in one forward pass. All other rows stay bit-identical.

    Attributes:
        places: The places that change.
    """

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        """Group the edits of the chunks' sequences by place, index, kind and features; the chunks' rows ascend.

        All single tokens are changed at once, and each sequence's span of several tokens by itself: one vector is then
        broadcast over it, and not repeated for each token.
        """
        stages: dict[HookSite, dict[tuple[EditKey, int], list[_Part]]] = {}
        for chunk in chunks:
            for (place, key), edit in with_slots(chunk.sequence.request.edits):
                if positions := edit.tokens.within(chunk.start, chunk.start + chunk.count):
                    row = chunk.row + positions[0] - chunk.start
                    alone = row if len(positions) > 1 else -1
                    parts = stages.setdefault(place, {}).setdefault((key, alone), [])
                    parts.append(_Part(edit, positions, row))
        self._changes = {
            place: [_Change(of[0], of_one) for of, of_one in sorted(parts.items(), key=lambda item: item[0][0].turn)]
            for place, parts in stages.items()
        }
        self.places = list(self._changes)

    def apply(self, place: HookSite, value: torch.Tensor, reader: ReadoutReader | None = None) -> torch.Tensor | None:
        """Return the changed value [rows, ...]; None if nothing changes. A gate of an edit needs a reader."""
        if place not in self._changes:
            return None
        changed = value.clone()
        for change in self._changes[place]:
            change.apply(changed, reader)
        return changed

    def move(self, positions: Mapping[int, Sequence[int]]) -> None:
        """Move to other tokens, one in each row: row -> its position."""
        for change in (change for changes in self._changes.values() for change in changes):
            for part in change.parts:
                part.positions = positions[part.row]


class _Change:
    """Edits that are applied at once, reusable for several forward passes."""

    def __init__(self, key: EditKey, parts: Sequence[_Part]) -> None:
        """Prepare one part with several tokens, or several parts with one token each."""
        self.parts = parts
        self._key = key
        self._is_gated = any(part.edit.gate for part in parts)
        self._counts = [len(part.positions) for part in parts]
        rows = [part.row + position - part.positions[0] for part in parts for position in part.positions]
        is_range = rows[-1] - rows[0] == len(rows) - 1
        self._rows = slice(rows[0], rows[-1] + 1) if is_range else torch.tensor(rows)
        vectors = [part.edit.rows(part.positions) for part in parts if part.edit.vector is not None]
        self._operands = _Operands(
            torch.tensor([part.edit.low for part in parts])[:, None, None],
            torch.tensor([part.edit.high for part in parts])[:, None, None],
            torch.cat(vectors) if vectors else None,
            *_indices(key),
        )

    def apply(self, value: torch.Tensor, reader: ReadoutReader | None) -> None:
        """Change a value [rows, ...] in place."""
        if self._operands.low.device != value.device:  # layers may be on several devices
            self._operands = self._operands.to(value.device)
            if isinstance(self._rows, torch.Tensor):
                self._rows = self._rows.to(value.device)
        point = value.view(len(value), *self._key.shape)  # heads are separate at a point of heads
        rows = point[self._rows]  # [changed, ...]
        opened = self._opened(rows, reader) if self._is_gated else None
        changed, norms = _changed(self._key, rows, self._operands)
        if opened is not None:
            changed = torch.where(opened.view(-1, *(1 for _ in self._key.shape)), changed, rows)
        if self._key.reports:
            self._collect("report", _relative(rows, changed), opened)
        if norms is not None:
            self._collect("norms", norms, opened)
        point[self._rows] = changed

    def _collect(self, name: str, values: torch.Tensor, opened: torch.Tensor | None) -> None:
        """Add the rows' values [changed] to the edits' norms or reports; NaN for rows that stay unchanged."""
        values = values if opened is None else torch.where(opened, values, torch.nan)
        for part, own in zip(self.parts, torch.split(values, self._counts), strict=True):
            if collected := getattr(part.edit, name):
                collected.add(part.positions, own)

    def _opened(self, rows: torch.Tensor, reader: ReadoutReader | None) -> torch.Tensor:
        """Which of the rows [changed, ...] the gates let pass, bool [changed]; called before they change."""
        here, firsts = [], itertools.accumulate(self._counts, initial=0)
        for part, first, count in zip(self.parts, firsts, self._counts, strict=False):
            if (gate := part.edit.gate) and gate.here:
                here.append((gate, first, gate.turn(part.positions[0]), count))
        if here:
            assert reader is not None
            reader.read_here(here, rows)
        everywhere = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
        gates = [(part.edit.gate, part.positions) for part in self.parts]
        return torch.cat([gate.opened(at).to(rows.device) if gate else everywhere[: len(at)] for gate, at in gates])


class _Operands(NamedTuple):
    """The tensors that edits of one key apply."""

    low: torch.Tensor  # [rows, 1, 1]
    high: torch.Tensor  # [rows, 1, 1]
    vectors: torch.Tensor | None  # [rows or 1, heads or 1, features]; of `PAIRED` kinds 2 * features
    heads: torch.Tensor | None  # the index of the heads; None for all
    features: torch.Tensor | None  # the index of the features; None for all

    def to(self, device: torch.device) -> _Operands:
        return _Operands(*(None if tensor is None else tensor.to(device) for tensor in self))  # type: ignore[arg-type]

    def first(self, rows: int) -> _Operands:
        """Those of the first rows."""
        vectors = None if self.vectors is None else self.vectors[:rows]
        return self._replace(low=self.low[:rows], high=self.high[:rows], vectors=vectors)


def _indices(key: EditKey) -> list[torch.Tensor | None]:
    """The indices of a key's heads and features."""
    return [None if index is None else torch.tensor(index) for index in (key.heads, key.features)]


def _changed(key: EditKey, rows: torch.Tensor, operands: _Operands) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The new value of rows [rows, ...], computed in float32 or wider, and for `add_norm` the norms, [rows]."""
    low, high, vectors, heads, features = operands
    by_head = rows.view(len(rows), -1, rows.shape[-1])  # [rows, heads or 1, features]
    part = by_head if heads is None else by_head.index_select(1, heads)
    x = part if features is None else part.index_select(-1, features)
    wide, norms = x.float() if x.dtype.itemsize < 4 else x, None
    v = wide if vectors is None else vectors
    match key.kind:
        case "add":
            new = wide + v
        case "add_norm":
            norms = wide.norm(dim=-1, keepdim=True)  # [rows, heads or 1, 1]
            new = wide + norms * v
            norms = norms.mean(dim=(1, 2))
        case "scale":
            new = wide * low
        case "project_out":
            new = wide - (wide * v).sum(-1, keepdim=True) / (v * v).sum(-1, keepdim=True) * v
        case "clamp":
            new = wide.clamp(low, high)
        case "clamp_projection":
            length = (wide * v).sum(-1, keepdim=True)
            new = wide + (length.clamp(low, high) - length) * v
        case "rotate":
            v, w = v.chunk(2, dim=-1)
            along, across = (wide * v).sum(-1, keepdim=True), (wide * w).sum(-1, keepdim=True)
            new = wide + (low * along - high * across) * v + (high * along + low * across) * w
        case "ablate":
            v, mean = v.chunk(2, dim=-1)
            new = wide + ((mean - wide) * v).sum(-1, keepdim=True) * v
        case "replace":
            new = v.expand_as(wide)
        case "mix":
            new = (1 - low) * wide + low * v
        case "feature":
            assert key.change is not None
            sae, feature, how = key.change
            new = wide + sae.change(wide.flatten(1), feature, how, low.flatten()).view_as(wide)
    new = new.to(x.dtype)
    if features is not None:
        new = part.index_copy(-1, features, new)
    if heads is not None:
        new = by_head.index_copy(1, heads, new)
    return new.view(rows.shape), norms


def _relative(before: torch.Tensor, changed: torch.Tensor) -> torch.Tensor:
    """The norm of each row's change, relative to the row's norm, [rows]."""
    before, changed = before.float().flatten(1), changed.float().flatten(1)
    norms: torch.Tensor = before.norm(dim=1).clamp(min=torch.finfo(torch.float32).tiny)
    change: torch.Tensor = (changed - before).norm(dim=1)
    return change / norms


class Plans:
    """The plan of each forward pass; the last one of single tokens is reused while the same rows change alike."""

    def __init__(self) -> None:
        self._of: list[tuple[int, ActingEdits]] = []
        self._plan = Plan([])

    def of(self, chunks: Sequence[Chunk]) -> Plan:
        """The plan of a forward pass."""
        edited = [chunk for chunk in chunks if chunk.sequence.request.edits]
        if any(chunk.count > 1 for chunk in edited):
            return Plan(chunks)
        acts = [(chunk.row, edits) for chunk in edited if (edits := chunk.sequence.acting_at(chunk.start)).edits]
        positioned = [edit for _, acting in acts for _, edit in acting.positioned]
        if acts != self._of or any(edit.per_token for edit in positioned):
            self._of, self._plan = acts, Plan(chunks)
        elif positioned:
            self._plan.move({chunk.row: (chunk.start,) for chunk in chunks})
        return self._plan


def signature(chunks: Sequence[Chunk]) -> Signature | None:
    """The places and keys of the edits that act on single tokens; None if only a `Plan` can apply one of them."""
    edited = (chunk for chunk in chunks if chunk.sequence.request.edits)
    return union(frozenset(chunk.sequence.acting_at(chunk.start).signature for chunk in edited))


class StaticPlan:
    """The edits of single tokens as tensors at fixed addresses, for CUDA graphs. Not run on a GPU yet.

    For each forward pass of up to `rows` rows, the caller calls `fill`, then `apply` at each of `places`, or replays a
    graph that recorded these calls, then `effects`, all on one stream. Where few of many rows change, a `Plan` is
    faster on a CPU.

    Vectors are held in the place's dtype, but at least in float32. Only rows that replace others may be wider: they are
    rounded to float32 first in any case.

    Attributes:
        places: The places that change.
        bytes: The memory of its vectors.
    """

    def __init__(self, signature: Signature, rows: int, device: torch.device) -> None:
        """Allocate the tensors for at most `rows` rows, without active ones; all places are on the device."""
        shape = 3, len(signature), rows
        self._host = np.zeros(shape, np.float32)  # low, high, and 1 for an active row: one upload
        self._numbers = torch.from_numpy(self._host).to(device)  # on a CPU the same memory
        self._active = torch.zeros(shape[1:], dtype=torch.bool, device=device)
        self._results = torch.zeros(len(signature), 2, rows, device=device)  # norms and relative changes
        self._index = {slot: i for i, slot in enumerate(sorted(signature, key=lambda slot: slot[1].turn))}
        self._slots: dict[HookSite, list[tuple[int, EditKey]]] = {}
        self._operands = list[_Operands]()
        low, high, _ = self._numbers[..., None, None]
        for (place, key), i in self._index.items():
            self._slots.setdefault(place, []).append((i, key))
            vectors = None
            if key.kind not in ("scale", "clamp"):
                heads = len(key.heads) if key.heads else math.prod(key.shape[:-1])
                features = len(key.features) if key.features else key.shape[-1]
                features *= 2 if key.kind in PAIRED else 1
                dtype = torch.promote_types(place.dtype, torch.float32)
                vectors = torch.zeros(rows, heads, features, dtype=dtype, device=device)
            self._operands.append(_Operands(low[i], high[i], vectors, *_indices(key)).to(device))
        self.places = list(self._slots)
        self.bytes = sum(own.vectors.nbytes for own in self._operands if own.vectors is not None)
        self._filled: dict[int, int] = {}  # row -> number of its acting edits
        self._collecting: list[tuple[Norms | Report, int, int, int]] = []

    def fill(self, chunks: Sequence[Chunk]) -> None:
        """Write what differs between the rows of the next forward pass and those of the last."""
        before, self._filled = self._filled, {}  # empty after an error, so that all rows are written again
        filled, self._collecting = dict[int, int](), []
        targets, vectors = list[torch.Tensor](), list[torch.Tensor]()
        for chunk in chunks:
            if not chunk.sequence.request.edits:
                continue
            row, acting = chunk.row, chunk.sequence.acting_at(chunk.start)
            filled[row] = acting.number
            is_new = before.get(row) != acting.number
            if is_new:
                self._host[2, :, row] = 0
            for slot, edit in acting.edits if is_new else acting.positioned:
                i = self._index[slot]
                if is_new:
                    self._host[:, i, row] = edit.low, edit.high, 1
                if (held := self._operands[i].vectors) is not None and (is_new or edit.per_token):
                    targets.append(held[row])
                    vectors.append(edit.rows((chunk.start,))[0])
                for which, collected in enumerate((edit.norms, edit.report)):
                    if collected:
                        at = (2 * i + which) * self._results.shape[-1] + row
                        self._collecting.append((collected, chunk.start, row, at))
        if targets:
            torch._foreach_copy_(targets, vectors)
        if filled != before:
            self._host[2][:, [row for row in range(self._host.shape[-1]) if row not in filled]] = 0
            if self._numbers.is_cuda:  # from pinned memory of its own: the host may write the next step's at once
                uploaded(self._host, self._numbers.device, self._numbers)
            torch.ne(self._numbers[2], 0, out=self._active)
        self._filled = filled

    def apply(self, place: HookSite, value: torch.Tensor) -> torch.Tensor | None:
        """Return the changed value [rows, ...]; None if nothing changes. Inactive rows keep every bit."""
        if place not in self._slots:
            return None
        count, changed = len(value), value
        for i, key in self._slots[place]:
            rows = changed.view(count, *key.shape)
            new, norms = _changed(key, rows, self._operands[i].first(count))
            changed = torch.where(self._active[i, :count].view(-1, *(1 for _ in key.shape)), new, rows)
            if norms is not None:
                self._results[i, 0, :count] = norms
            if key.reports:
                self._results[i, 1, :count] = _relative(rows, changed)
        return changed.reshape(value.shape)

    def effects(self) -> Effects:
        """A copy of the norms and changes of the forward pass; the next one overwrites them."""
        collecting, self._collecting = self._collecting, []  # it must not keep edits in memory
        return Effects(collecting, self._results.flatten().clone() if collecting else self._results)


class Effects(NamedTuple):
    """The norms and changes of one forward pass by a `StaticPlan`, and what collects them."""

    collecting: Sequence[tuple[Norms | Report, int, int, int]]  # position, row, and index in the values
    values: torch.Tensor

    def keep(self, kept: Container[int]) -> None:
        """Add the numbers of these rows to their edits."""
        for collected, position, row, at in self.collecting:
            if row in kept:
                collected.add((position,), self.values[at : at + 1])
