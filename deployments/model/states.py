"""Layers with a state of fixed size: convolutions, linear attention, state-space models.

A module with a state reads [sequences, tokens, hidden]. In a forward pass of packed rows, it runs once for all decodes,
as [rows, 1, hidden], and once for each prompt; everything else in the model sees the packed rows. The states of all
sequences are in slots of one tensor for each layer. transformers' own cache layer holds the states during a call, so
a model's code finds what it expects.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import (
    DummyLayer,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)

from deployments.model.batch import Batch

NO_SLOT = 0  # of sequences without a state, and of padding rows
READERS = {"get_conv_state", "get_recurrent_state", "update_conv_state", "update_recurrent_state"}
STATELESS = (DynamicLayer, DynamicSlidingWindowLayer, DummyLayer)
KINDS = ("conv_states", "recurrent_states")  # attributes of transformers' cache layers

Key = tuple[int, str, int]  # layer, kind, number of the state within the layer


class RowGroup(NamedTuple):
    """Consecutive rows of a forward pass that a module with a state takes in one call."""

    first: int
    rows: int  # their number
    single: bool  # whether each row is a token of a sequence of its own; otherwise they are tokens of one sequence
    fresh: bool  # whether the sequence begins here, without a state
    slots: torch.Tensor | slice  # of the sequences' states: [rows] int64, or a slice for one sequence

    def cut(self, value: torch.Tensor, packed: int) -> torch.Tensor:
        """The group's part of [1, packed, ...]: [rows, 1, ...] or [1, rows, ...]; other tensors as they are."""
        if value.shape[:2] != (1, packed):
            return value
        part = value[:, self.first : self.first + self.rows]
        return part.transpose(0, 1) if self.single else part

    def pack(self, value: torch.Tensor) -> torch.Tensor:
        """[1, rows, ...] of a result; TypeError if it does not have these rows."""
        if value.shape[:2] != ((self.rows, 1) if self.single else (1, self.rows)):
            raise TypeError("a module with a state gives other rows than it reads")
        return value.transpose(0, 1) if self.single else value


class States:
    """The states of all sequences; `layers` are transformers' cache layers, which hold a layer's during a call."""

    def __init__(self, layers: Sequence[Any], slots: int, like: States | None = None) -> None:
        """Allocate slots, numbered from 0, like those of `like`; without it, the first forward pass allocates them."""
        self.layers: Sequence[Any] = like.layers if like else layers
        self._slots = slots
        known = like._held if like else {}
        self._held: dict[Key, torch.Tensor] = {key: _slots_like(held, slots) for key, held in known.items()}

    @property
    def slot_bytes(self) -> Counter[torch.device]:
        """Bytes of one slot over all layers on each device."""
        sizes: Counter[torch.device] = Counter()
        for held in self._held.values():
            sizes[held.device] += held[:1].nbytes
        return sizes

    def load(self, index: int, group: RowGroup) -> None:
        """Hand a layer's cache layer the states of a group; those of one sequence are updated in their slot."""
        layer = self.layers[index]
        for kind in KINDS:
            now = getattr(layer, kind)
            for number in now:
                if (held := self._held.get((index, kind, number))) is not None:
                    slots = _on(group.slots, held.device)
                    now[number] = held[slots] if isinstance(slots, slice) else held.index_select(0, slots)
        layer.has_previous_state = dict.fromkeys(layer.has_previous_state, not group.fresh)

    def store(self, index: int, group: RowGroup) -> None:
        """Write a layer's states back to the slots of a group."""
        for kind in KINDS:
            now = getattr(self.layers[index], kind)
            for number, value in now.items():
                if value is None:
                    continue
                key = index, kind, number
                if key not in self._held:
                    self._held[key] = _slots_like(value, self._slots)
                held = self._held[key]
                slots = _on(group.slots, held.device)
                if isinstance(slots, torch.Tensor):
                    held.index_copy_(0, slots, value)
                elif held[slots].data_ptr() != value.data_ptr():
                    held[slots] = value
                now[number] = held[:1]  # so that the group's copy is released

    def of(self, slot: int) -> list[torch.Tensor]:
        """The states in a slot, layer by layer."""
        return [held[slot] for _, held in sorted(self._held.items())]

    def saved(self, slots: torch.Tensor) -> Callable[[], None]:
        """Copy the states of [sequences] slots; calling the result restores them."""
        copies = {key: held[slots.to(held.device)] for key, held in self._held.items()}

        def restore() -> None:
            for key, copy in copies.items():
                self._held[key][slots.to(copy.device)] = copy

        return restore


class Mixers:
    """The modules of a model that keep a state of each sequence.

    Attributes:
        paths: Path of each such module -> index of its layer in the cache.
        has_states: Whether layers of transformers' cache hold more than the keys and values of attention.
        stepwise: Whether a prompt's later pieces run token by token: some models begin each piece without a state.
    """

    def __init__(self, hf: Any) -> None:
        """Find the modules; until `running`, they run as before."""
        self.paths: dict[str, int] = {}
        self.stepwise = False
        self._running: tuple[States, Sequence[RowGroup], int] | None = None
        layers = cache_of(hf).layers
        self.has_states = any(type(layer) not in STATELESS for layer in layers)
        if not any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers):
            return
        for path, module in hf.named_modules():
            code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
            if code and READERS & set(code.co_names) and hasattr(module, "layer_idx"):
                self.paths[path] = module.layer_idx
                module.forward = functools.partial(self._run, module.layer_idx, module.forward)

    def contain(self, path: str) -> bool:
        """Whether a module is part of such a module, and so runs several times in a forward pass with prompts."""
        return any(path.startswith(f"{mixer}.") for mixer in self.paths)

    @contextmanager
    def running(self, batch: Batch, states: States) -> Iterator[None]:
        """While open, the modules run a batch."""
        self._running = (states, list(self._groups(batch)), batch.rows) if self.paths else None
        try:
            yield
        finally:
            self._running = None

    def _groups(self, batch: Batch) -> Iterator[RowGroup]:
        slots = batch.slots.long()
        if batch.singles == batch.rows and all(span.start for span in batch.spans):  # padding rows among them
            yield RowGroup(0, batch.rows, True, False, slots)
            return
        rows = zip(batch.firsts, batch.spans, strict=True)
        for single, group in groupby(rows, lambda row: row[1].count == 1 and row[1].start > 0):
            if single:
                (first, _), *more = group
                count = 1 + len(more)
                yield RowGroup(first, count, True, False, slots[first : first + count])
                continue
            for first, span in group:
                step = 1 if self.stepwise and span.start else span.count
                for at in range(0, span.count, step):
                    slot = slice(span.kv.slot, span.kv.slot + 1)
                    yield RowGroup(first + at, step, False, span.start == 0, slot)

    def _run(self, index: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._running is None:
            return forward(*args, **kwargs)
        states, groups, packed = self._running
        results = []
        for group in groups:
            states.load(index, group)
            own, named = _each((args, kwargs), functools.partial(group.cut, packed=packed))
            results.append(_each(forward(*own, **named), group.pack))
            states.store(index, group)
        return results[0] if len(results) == 1 else _joined(results)


def cache_of(hf: Any) -> DynamicCache:
    """The library's own cache for one sequence of a model."""
    return DynamicCache(config=hf.config.get_text_config())


def _each(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A value with a function applied to its tensors."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if type(value) in (tuple, list):
        return type(value)(_each(part, function) for part in value)
    if type(value) is dict:
        return {name: _each(part, function) for name, part in value.items()}
    return value


def _joined(results: Sequence[Any]) -> Any:
    """The results of consecutive groups as one."""
    if isinstance(results[0], torch.Tensor):
        return torch.cat(list(results), 1)
    if isinstance(results[0], (tuple, list)):
        return type(results[0])(map(_joined, zip(*results, strict=True)))
    return results[0]


def _slots_like(state: torch.Tensor, slots: int) -> torch.Tensor:
    """[slots, ...] of zeros; written at once, so that the system counts the memory."""
    return state.new_empty(slots, *state.shape[1:]).zero_()


def _on(slots: torch.Tensor | slice, device: torch.device) -> torch.Tensor | slice:
    return slots.to(device) if isinstance(slots, torch.Tensor) else slots
