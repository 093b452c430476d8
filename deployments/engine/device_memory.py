"""Memory of a device: what is free, what is held, and the error when none is left."""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import torch

CGROUPS = (  # versions 2 and 1: limit, use, and where that says what files hold of it
    ("memory.max", "memory.current", ("memory.stat", "inactive_file")),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", ("memory/memory.stat", "total_inactive_file")),
)
_PAGE = Path("/proc/self/statm")
_NO_MEMORY = ("can't allocate memory", "not enough memory", "CUDA error: out of memory", "STATUS_ALLOC_FAILED")
_ASKED = re.compile(r"allocate ([\d.]+ ?(?:[KMGT]i?B|bytes))", re.IGNORECASE)


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
    reserved = torch.cuda.memory_reserved(device) if device.type == "cuda" else psutil.Process().memory_info().vms
    held = f"{mib(held_bytes(device))} allocated, {mib(reserved)} reserved"
    return f"{held}, {asked[1] if asked else 'an unknown size'} asked for, {mib(free_bytes(device))} free"


def mib(size: int) -> str:
    """A size for people."""
    return f"{size / 2**20:.1f} MiB"
