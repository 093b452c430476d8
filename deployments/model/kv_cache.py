"""KV slots: one row of memory per request that is under way, each with its own length."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class Window:
    """Which part of the slots the next forward writes and reads; one for all layers.

    Attributes:
        first: The first slot a prefill fills; its rows are first, first + 1, ...
        start: The position at which a prefill begins. Behind 0 its one row attends to what its slot holds.
        rows: [batch] slot of each decoded row, always 0..batch-1; None in a prefill.
        positions: [batch] where each decoded row writes; None in a prefill.
        length: How many positions are read.
        slots: Slots to allocate, at least.
        capacity: Positions per slot to allocate, at least.
    """

    first: int = 0
    start: int = 0
    rows: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    length: int = 0
    slots: int = 0
    capacity: int = 0


class SlotLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer's keys and values, [slots, kv_heads, capacity, head_dim]."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, window: Window) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.window = window

    @property
    def memories(self) -> list[torch.Tensor]:
        """Keys and values, once there are any."""
        return [self.keys, self.values] if self.is_initialized else []

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate for the window's slots and capacity; heads, sizes and dtype are the model's."""
        self.keys, self.values = self._allocate(key_states), self._allocate(value_states)
        self.is_initialized = True

    def _allocate(self, like: torch.Tensor) -> torch.Tensor:
        # Zeros: what a masked position holds must be finite, since 0 x NaN is NaN.
        return like.new_zeros(self.window.slots, like.shape[1], self.window.capacity, like.shape[3])

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new rows and give what attention reads.

        Args:
            key_states: [batch, kv_heads, tokens, head_dim].
            value_states: The same.
            args: What some models pass beside them; unused.
            kwargs: The same.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        window = self.window
        batch, _, tokens, _ = key_states.shape
        if window.rows is None:
            slots, stop = slice(window.first, window.first + batch), window.start + tokens
            self.keys[slots, :, window.start : stop] = key_states
            self.values[slots, :, window.start : stop] = value_states
            if not window.start:
                return key_states, value_states
            return self.keys[slots, :, :stop], self.values[slots, :, :stop]
        assert window.positions is not None
        rows, positions = window.rows.to(self.keys.device), window.positions.to(self.keys.device)
        self.keys[rows, :, positions] = key_states[:, :, 0]
        self.values[rows, :, positions] = value_states[:, :, 0]
        return self.keys[:batch, :, : window.length], self.values[:batch, :, : window.length]

    def resize(self) -> None:
        """Grow or shrink to the window's slots and capacity, keeping what fits."""
        if not self.is_initialized:
            return
        for name in ("keys", "values"):
            old = getattr(self, name)
            if (old.shape[0], old.shape[2]) == (self.window.slots, self.window.capacity):
                continue
            new = self._allocate(old)
            slots, length = min(old.shape[0], new.shape[0]), min(old.shape[2], new.shape[2])
            new[:slots, :, :length] = old[:slots, :, :length]
            setattr(self, name, new)  # the old one is freed here, layer by layer: the transient is one layer's

    def swap(self, a: int, b: int, length: int) -> None:
        """Exchange the first `length` positions of two slots."""
        for memory in self.memories:
            bits = BITS[memory.element_size()]
            one, other = memory[a, :, :length].view(bits), memory[b, :, :length].view(bits)
            # By exclusive or, which needs no memory: a swap cannot end halfway.
            one.bitwise_xor_(other)
            other.bitwise_xor_(one)
            one.bitwise_xor_(other)

    def clear(self, slot: int, length: int) -> None:
        """Zero the first `length` positions of a slot."""
        for memory in self.memories:
            memory[slot, :, :length].zero_()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(keys read, offset of the first); transformers builds a whole prefill's own masks from it."""
        if self.window.rows is None:
            return self.window.start + query_length, 0
        return self.window.length, 0

    def get_seq_length(self) -> int:
        """Where a prefill starts; in a decode the longest row's tokens before this one."""
        return self.window.start if self.window.rows is None else self.window.length - 1

    def get_max_length(self) -> int:
        """-1: it grows."""
        return -1


class SlotCache(Cache):
    """The KV memory of all requests that are under way.

    Decoding requests hold slots 0..n-1 without gaps, so that a decode reads `[:n, :, :longest]` as a view.
    """

    def __init__(self, layers: int) -> None:
        self.window = Window()
        self._slots = [SlotLayer(self.window) for _ in range(layers)]
        super().__init__(layers=list(self._slots))

    def prefill(self, first: int, start: int = 0) -> None:
        """Make the next forward fill slots from `first` on; from position `start` > 0 on, one slot."""
        self.window.first, self.window.start = first, start
        self.window.rows = self.window.positions = None

    def decode(self, rows: torch.Tensor, positions: torch.Tensor, longest: int) -> None:
        """Make the next forward add one token to each of slots 0..n-1.

        Args:
            rows: [n] 0..n-1, on the model's device.
            positions: [n] where each row writes.
            longest: The longest row after this token.
        """
        self.window.rows, self.window.positions, self.window.length = rows, positions, longest

    def resize(self, slots: int, capacity: int) -> None:
        """Reallocate to `slots` of `capacity` positions each.

        Raises:
            RuntimeError: torch's, where memory does not suffice; the size is then as it was.
        """
        before = self.window.slots, self.window.capacity
        if (slots, capacity) == before:
            return
        self.window.slots, self.window.capacity = slots, capacity
        try:
            for layer in self._slots:
                layer.resize()
        except RuntimeError:  # out of memory: what has grown gives it back
            self.window.slots, self.window.capacity = before
            for layer in self._slots:
                layer.resize()
            raise

    def swap(self, a: int, b: int, length: int) -> None:
        """Exchange two slots, of which `length` positions are in use."""
        for layer in self._slots:
            layer.swap(a, b, length)

    def clear(self, slot: int, length: int) -> None:
        """Zero a slot, of which `length` positions were in use."""
        for layer in self._slots:
            layer.clear(slot, length)

    @property
    def bytes(self) -> int:
        """Memory held, in bytes."""
        return self.bytes_by_device.total()

    @property
    def bytes_by_device(self) -> Counter[torch.device]:
        """Memory held, in bytes: a model's layers may lie on several devices."""
        held: Counter[torch.device] = Counter()
        for layer in self._slots:
            for memory in layer.memories:
                held[memory.device] += memory.nbytes
        return held
