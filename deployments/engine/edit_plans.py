"""Edits in a forward pass: one operation of each kind at a place, for all sequences that request it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from deployments.engine.edits import Edit, FeatureChange, Index, Kind
from deployments.engine.scheduler import Chunk
from deployments.places.hook_site import HookSite
from deployments.readouts.reading import ReadoutReader


class _Key(NamedTuple):
    """The properties that edits must share to be applied at once."""

    turn: int  # index among a sequence's edits at the place
    kind: Kind
    shape: tuple[int, ...]
    heads: Index
    features: Index
    change: FeatureChange | None


class _Part(NamedTuple):
    """One sequence's edit of some of the tokens in a forward pass."""

    edit: Edit
    positions: Sequence[int]
    shift: int  # from a position to its row in the forward pass


class Plan:
    """The changes in one forward pass. All other rows stay bit-identical.

    Attributes:
        places: The places that change.
    """

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        """Group the edits of the chunks' sequences by place, index, kind and features."""
        stages: dict[HookSite, dict[_Key, list[_Part]]] = {}
        for chunk in chunks:
            turns: Counter[HookSite] = Counter()
            for edit in chunk.sequence.request.edits:
                place = edit.point.place
                key = _Key(turns[place], edit.kind, edit.point.shape, edit.heads, edit.features, edit.change)
                turns[place] += 1
                if positions := edit.tokens.within(chunk.start, chunk.start + chunk.count):
                    part = _Part(edit, positions, chunk.row - chunk.start)
                    stages.setdefault(place, {}).setdefault(key, []).append(part)
        self._changes = {
            place: [change for key in sorted(parts, key=lambda key: key.turn) for change in _changes(key, parts[key])]
            for place, parts in stages.items()
        }
        self.places = list(self._changes)

    def apply(self, place: HookSite, value: torch.Tensor, reader: ReadoutReader | None = None) -> torch.Tensor | None:
        """Return the changed value [rows, ...]; None if nothing changes.

        Args:
            place: The place.
            value: The original value.
            reader: Reads the gates' readouts; required if an edit has a gate.
        """
        if place not in self._changes:
            return None
        changed = value.clone()
        for change in self._changes[place]:
            change.apply(changed, reader)
        return changed

    def move(self, positions: Mapping[int, int]) -> None:
        """Move to other tokens, one in each row: row -> position."""
        for changes in self._changes.values():
            for change in changes:
                change.move(positions)


def _changes(key: _Key, parts: Sequence[_Part]) -> Iterator[_Change]:
    """One change for all single tokens, and one for each sequence's span of several tokens.

    A span is a slice over which one vector is broadcast; the vector is not repeated for each token.
    """
    single = [part for part in parts if len(part.positions) == 1]
    if single:
        yield _Change(key, single, torch.tensor([part.positions[0] + part.shift for part in single]))
    for part in parts:
        if len(part.positions) > 1:
            rows = [position + part.shift for position in part.positions]
            is_range = rows[-1] - rows[0] == len(rows) - 1
            yield _Change(key, [part], slice(rows[0], rows[-1] + 1) if is_range else torch.tensor(rows))


class _Change:
    """Edits that are applied at once, reusable for several forward passes."""

    def __init__(self, key: _Key, parts: Sequence[_Part], rows: slice | torch.Tensor) -> None:
        """Prepare edits of a kind.

        Args:
            key: Their shared properties.
            parts: One part with several tokens, or several parts with one token each.
            rows: Their rows in the forward pass.
        """
        self._key = key
        self._rows = rows
        self._parts = parts
        self._is_watched = any(part.edit.is_watched for part in parts)
        self._norms = [(part.edit.norms, part.positions, part.positions[0] + part.shift) for part in parts]
        self._counts = [len(part.positions) for part in parts]
        self._moved: Mapping[int, int] | None = None  # the argument of `move`; norms need nothing else
        self._tensors = {
            "low": torch.tensor([part.edit.low for part in parts])[:, None, None],
            "high": torch.tensor([part.edit.high for part in parts])[:, None, None],
        }
        vectors = [part.edit.rows(part.positions) for part in parts if part.edit.vector is not None]
        if vectors:
            self._tensors["vectors"] = torch.cat(vectors)  # [changed or 1, heads or 1, features]
        for name in ("heads", "features"):
            if (index := getattr(key, name)) is not None:
                self._tensors[name] = torch.tensor(index)

    def move(self, positions: Mapping[int, int]) -> None:
        self._moved = positions
        if self._is_watched:
            rows = [part.positions[0] + part.shift for part in self._parts]
            self._parts = [
                _Part(part.edit, (positions[row],), row - positions[row])
                for part, row in zip(self._parts, rows, strict=True)
            ]

    def apply(self, value: torch.Tensor, reader: ReadoutReader | None) -> None:
        """Change a value [rows, ...] in place."""
        if self._tensors["low"].device != value.device:  # layers may be on several devices
            self._tensors = {name: tensor.to(value.device) for name, tensor in self._tensors.items()}
            if isinstance(self._rows, torch.Tensor):
                self._rows = self._rows.to(value.device)
        which = self._rows
        point = value.view(len(value), *self._key.shape)  # heads are separate at a point of heads
        rows = point[which]  # [changed, ...]
        before, opened = rows, None
        if self._is_watched:
            before, opened = rows.clone(), self._opened(rows, reader)
        by_head = rows.view(len(rows), -1, rows.shape[-1])  # [changed, heads or 1, features]
        heads, features = self._tensors.get("heads"), self._tensors.get("features")
        part = by_head if heads is None else by_head[:, heads]
        if features is None:
            part = self._edited(part, opened)
        else:
            part = part.clone()
            part[..., features] = self._edited(part[..., features], opened)
        if heads is None:
            by_head = part
        else:
            by_head[:, heads] = part
        changed = by_head.view(rows.shape)
        if opened is not None:
            changed = torch.where(opened.view(-1, *(1 for _ in changed.shape[1:])), changed, before)
            self._report(before, changed, opened)
        point[which] = changed

    def _opened(self, rows: torch.Tensor, reader: ReadoutReader | None) -> torch.Tensor:
        """Which of the rows [changed, ...] the gates let pass, bool [changed]; called before they change."""
        here, first = [], 0
        for part in self._parts:
            count = len(part.positions)
            gate = part.edit.gate
            if gate and gate.here:
                here.append((gate, first, gate.turn(part.positions[0]), count))
            first += count
        if here:
            assert reader is not None
            reader.read_here(here, rows)
        device = rows.device
        opened = [
            gate.opened(part.positions).to(device)
            if (gate := part.edit.gate)
            else torch.ones(len(part.positions), dtype=torch.bool, device=device)
            for part in self._parts
        ]
        return torch.cat(opened)

    def _report(self, before: torch.Tensor, changed: torch.Tensor, opened: torch.Tensor) -> None:
        """Report the changes of rows [changed, ...]."""
        if not any(part.edit.report for part in self._parts):
            return
        before, changed = before.float().flatten(1), changed.float().flatten(1)
        change = (changed - before).norm(dim=1) / before.norm(dim=1).clamp(min=torch.finfo(torch.float32).tiny)
        change = torch.where(opened, change, torch.nan)
        for part, changes in zip(self._parts, torch.split(change, self._counts), strict=True):
            if part.edit.report:
                part.edit.report.add(part.positions, changes)

    def _edited(self, x: torch.Tensor, opened: torch.Tensor | None) -> torch.Tensor:
        """The new value of x [changed, heads or 1, features], in its dtype; computed in float32 or wider."""
        wide = x.float() if x.dtype.itemsize < 4 else x
        low, high, v = self._tensors["low"], self._tensors["high"], self._tensors.get("vectors", wide)
        match self._key.kind:
            case "add":
                new = wide + v
            case "add_norm":
                norms = wide.norm(dim=-1, keepdim=True)  # [changed, heads or 1, 1]
                new = wide + norms * v
                mean = norms.mean(dim=(1, 2))
                mean = mean if opened is None else torch.where(opened, mean, torch.nan)
                for (gathered, positions, row), part in zip(self._norms, torch.split(mean, self._counts), strict=True):
                    if gathered is not None:
                        gathered.add(positions if self._moved is None else (self._moved[row],), part)
            case "scale":
                new = wide * low
            case "project_out":
                new = wide - (wide * v).sum(-1, keepdim=True) / (v * v).sum(-1, keepdim=True) * v
            case "clamp":
                new = wide.clamp(low, high)
            case "replace":
                new = v.expand_as(wide)
            case "feature":
                assert self._key.change is not None
                sae, feature, how = self._key.change
                new = wide + sae.change(wide.flatten(1), feature, how, low.flatten()).view_as(wide)
        return new.to(x.dtype)


class Plans:
    """The plan of each forward pass; the last one is reused while the same rows change in the same way."""

    def __init__(self) -> None:
        self._of: list[tuple[int, list[Edit]]] | None = None
        self._plan = Plan([])

    def of(self, chunks: Sequence[Chunk]) -> Plan:
        """The plan of a forward pass."""
        edited = [(chunk, edits) for chunk in chunks if (edits := chunk.sequence.request.edits)]
        if any(chunk.count > 1 for chunk, _ in edited):
            self._of = None
            return Plan(chunks)
        active = [
            (chunk.row, acting)
            for chunk, edits in edited
            if (acting := [edit for edit in edits if edit.tokens.within(chunk.start, chunk.start + 1)])
        ]
        if active != self._of or any(edit.per_token for _, edits in active for edit in edits):
            self._of, self._plan = active, Plan(chunks)
        elif any(edit.names_rows for _, edits in active for edit in edits):
            self._plan.move({chunk.row: chunk.start for chunk in chunks})
        return self._plan
