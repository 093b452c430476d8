"""Memory: the KV slots' size under one budget, what is held now, and what to say when there is none left."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import psutil
import torch

from deployments.model.model import Model

FIRST_CAPACITY = 256  # positions of a slot's first bucket; each next one is twice as long
CGROUPS = (  # versions 2 and 1: limit, use, and where that says what files hold of it
    ("memory.max", "memory.current", ("memory.stat", "inactive_file")),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        ("memory/memory.stat", "total_inactive_file"),
    ),
)
_PAGE = Path("/proc/self/statm")
_NO_MEMORY = ("can't allocate memory", "not enough memory", "CUDA error: out of memory", "STATUS_ALLOC_FAILED")
_ASKED = re.compile(r"allocate ([\d.]+ ?(?:[KMGT]i?B|bytes))", re.IGNORECASE)


class KvMemory:
    """The KV slots of all requests under way, grown and shrunk within a budget.

    Attributes:
        cache: The slots.
        budget: The most positions that all slots may have together.
        position_bytes: Bytes of one position over all layers.
    """

    def __init__(
        self, model: Model, max_slots: int, kv_bytes: int | None = None, kv_fraction: float | None = None
    ) -> None:
        """Hold nothing yet.

        Args:
            model: Whose keys and values they are.
            max_slots: The most slots.
            kv_bytes: The budget.
            kv_fraction: The budget as a part of what is free now, where `kv_bytes` is not given; by default
                half of it.
        """
        self.cache = model.new_cache()
        by_device = _position_bytes(model)
        self.position_bytes = by_device.total()
        free = min(int(free_bytes(device) * (kv_fraction or 0.5)) // size for device, size in by_device.items())
        self.budget = kv_bytes // self.position_bytes if kv_bytes else free
        self._max_slots = max_slots
        self._context = model.context

    @property
    def longest(self) -> int:
        """The most tokens that a sequence may have by itself."""
        capacity = FIRST_CAPACITY
        while capacity < self._context and self.fits(1, min(2 * capacity, self._context)):
            capacity *= 2
        return min(capacity, self._context)

    def fits(self, slots: int, need: int) -> bool:
        """Whether `slots` sequences of `need` tokens are within the budget."""
        held, capacity = self._buckets(slots, need)
        return held * capacity <= self.budget

    def reserve(self, slots: int, need: int, keep: bool) -> None:
        """Make room for `slots` sequences of `need` tokens.

        Args:
            slots: How many sequences.
            need: Tokens of the longest.
            keep: Stay as large as it is where the budget allows: there are sequences in it to copy otherwise.
        """
        window = self.cache.window
        held, capacity = self._buckets(slots, need)
        larger = max(held, window.slots), max(capacity, window.capacity)
        if keep and larger[0] * larger[1] <= self.budget:
            held, capacity = larger
        self.cache.resize(held, capacity)

    def trim(self, slots: int, need: int) -> None:
        """Give back all that `slots` sequences of `need` tokens do not need."""
        held, capacity = self._buckets(slots, need) if slots else (0, 0)
        window = self.cache.window
        self.cache.resize(min(held, window.slots), min(capacity, window.capacity))

    def _buckets(self, slots: int, need: int) -> tuple[int, int]:
        return min(_bucket(slots, 1), self._max_slots), min(_bucket(need, FIRST_CAPACITY), max(need, self._context))


@torch.inference_mode()
def _position_bytes(model: Model) -> Counter[torch.device]:
    """Bytes that one position takes on each device over all layers, as one token's prefill shows."""
    cache = model.new_cache()
    cache.resize(1, 1)
    cache.prefill(0)
    one = torch.ones(1, 1, dtype=torch.long, device=model.device)
    model.prefill(one, one[0], cache)
    return cache.bytes_by_device


def _bucket(value: int, first: int) -> int:
    """The smallest first * 2**k that holds `value`."""
    bucket = first
    while bucket < value:
        bucket *= 2
    return bucket


def free_bytes(device: torch.device) -> int:
    """Memory that could be taken now; in a container, within its limit."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = int(psutil.virtual_memory().available)
    left = left_in_container()
    return free if left is None else min(free, left)


def left_in_container(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What Linux's control group of this process may still take; None without a limit. What files hold can be freed."""
    for limit, used, held_by_files in CGROUPS:
        try:
            statistics = dict(line.split() for line in (root / held_by_files[0]).read_text().splitlines())
            in_use = int((root / used).read_text()) - int(statistics[held_by_files[1]])
            return max(0, int((root / limit).read_text()) - in_use)
        except (OSError, ValueError, KeyError):  # another version of control groups, or "max"
            continue
    return None


def held_bytes(device: torch.device) -> int:
    """Memory held now: by tensors on a GPU, else by this process."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    if _PAGE.exists():  # a third of what psutil takes, each step
        return int(_PAGE.read_bytes().split()[1]) * 4096
    return int(psutil.Process().memory_info().rss)


def peak_bytes(device: torch.device) -> int:
    """The most memory held since this was last asked, on a GPU; else what is held now."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    return held_bytes(device)


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error says that there is no memory; on a CPU torch has no type of its own for it."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and any(words in text for words in _NO_MEMORY)


def release_cached(device: torch.device) -> None:
    """Give the allocator's unused blocks back."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def describe(device: torch.device, error: Exception) -> str:
    """Allocated, reserved and asked-for memory, in words."""
    asked = _ASKED.search(str(error))
    held = f"{mib(held_bytes(device))} allocated"
    if device.type == "cuda":
        held += f", {mib(torch.cuda.memory_reserved(device))} reserved"
    else:
        held += f", {mib(psutil.Process().memory_info().vms)} reserved"
    return f"{held}, {asked[1] if asked else 'an unknown size'} asked for, {mib(free_bytes(device))} free"


def mib(size: int) -> str:
    """A size for people."""
    return f"{size / 2**20:.1f} MiB"
