"""The KV memory's size: slots x positions in buckets, under one budget."""

from __future__ import annotations

import psutil
import torch

from deployments.engine.model import Model

FIRST_CAPACITY = 256  # positions of a slot's first bucket; each next one is twice as long


class Memory:
    """The KV slots of all running requests, grown and shrunk within a budget.

    Attributes:
        cache: The slots.
        budget: The most positions that all slots may have together.
    """

    def __init__(self, model: Model, max_slots: int, kv_bytes: int | None = None) -> None:
        """Hold nothing yet.

        Args:
            model: Whose keys and values they are.
            max_slots: The most slots.
            kv_bytes: The budget; by default half of what is free now.
        """
        self.cache = model.new_cache()
        self.budget = (kv_bytes or _free_bytes(model.device) // 2) // _position_bytes(model)
        self._max_slots = max_slots

    def fits(self, slots: int, need: int) -> bool:
        """Whether `slots` rows of `need` tokens are within the budget."""
        held, capacity = self._buckets(slots, need)
        return held * capacity <= self.budget

    def reserve(self, slots: int, need: int, keep: bool) -> None:
        """Make room for `slots` rows of `need` tokens.

        Args:
            slots: How many rows.
            need: Tokens of the longest.
            keep: Stay as large as it is where the budget allows: there are rows in it to copy otherwise.
        """
        window = self.cache.window
        held, capacity = self._buckets(slots, need)
        larger = max(held, window.slots), max(capacity, window.capacity)
        if keep and larger[0] * larger[1] <= self.budget:
            held, capacity = larger
        self.cache.resize(held, capacity)

    def _buckets(self, slots: int, need: int) -> tuple[int, int]:
        return min(_bucket(slots, 1), self._max_slots), _bucket(need, FIRST_CAPACITY)


@torch.inference_mode()
def _position_bytes(model: Model) -> int:
    """Bytes that one position takes over all layers, as one token's prefill shows."""
    cache = model.new_cache()
    cache.resize(1, 1)
    cache.prefill(0)
    one = torch.ones(1, 1, dtype=torch.long, device=model.device)
    model.prefill(one, one[0], cache)
    return cache.bytes


def _bucket(value: int, first: int) -> int:
    """The smallest first * 2**k that holds `value`."""
    bucket = first
    while bucket < value:
        bucket *= 2
    return bucket


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return int(psutil.virtual_memory().available)
