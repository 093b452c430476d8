"""Memory of a device: how much is free or held, and errors of running out."""

from __future__ import annotations

import contextlib
import functools
import glob
import mmap
import os
import re
import weakref
from pathlib import Path

import psutil
import torch

CGROUPS = (  # versions 2 and 1: limit, use, and the file and key with the size of cached files
    ("memory.max", "memory.current", ("memory.stat", "inactive_file")),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", ("memory/memory.stat", "total_inactive_file")),
)
_RESERVED = "vitrine pages of "  # how the names of reservations begin
_NAME_CHARACTERS = 50  # of a model's name; a file's name has at most 249 bytes
_NO_MEMORY = (
    *("can't allocate memory", "not enough memory", "CUDA error: out of memory", "STATUS_ALLOC_FAILED"),
    "Triton Error [CUDA]: out of memory",
)
_FAULT = ("CUDA error", "Triton Error [CUDA]")
_ASKED = re.compile(r"allocate ([\d.]+ ?(?:[KMGT]i?B|bytes))", re.IGNORECASE)


def free_bytes(device: torch.device) -> int:
    """Memory that can be allocated now; in a container, within its limit."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = int(psutil.virtual_memory().available)
    left = left_in_container()
    return free if left is None else min(free, left)


def left_in_container(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What this process's Linux control group may still allocate; None without a limit. Cached files count as free."""
    for limit, used, held_by_files in CGROUPS:
        try:
            statistics = dict(line.split() for line in (root / held_by_files[0]).read_text().splitlines())
            in_use = int((root / used).read_text()) - int(statistics[held_by_files[1]])
            return max(0, int((root / limit).read_text()) - in_use)
        except (OSError, ValueError, KeyError):  # another version of control groups, or "max"
            continue
    return None


class Reservation:
    """Memory of a CPU that this process has reserved and not touched: the system counts it as free.

    Other processes of the same user on this machine see its size as the length of an empty file in memory, which is
    gone when this process ends. Where the system has or allows no such file, nothing is seen.
    """

    def __init__(self, model: str) -> None:
        self._file: int | None = None
        with contextlib.suppress(AttributeError, OSError):  # there is none here, or the system refuses it
            self._file = os.memfd_create(_reserved(model))
            weakref.finalize(self, os.close, self._file)

    def resize(self, size: int) -> None:
        """Set the bytes that are reserved and not touched now."""
        if self._file is not None:
            os.ftruncate(self._file, size)


def unreserved_bytes(device: torch.device, model: str) -> int:
    """The free memory of a device that is not reserved for another model than this one; at least a tenth of it."""
    free = free_bytes(device)
    return max(free // 10, free - (reserved_for_others(model) if device.type == "cpu" else 0))


def reserved_for_others(model: str) -> int:
    """Bytes that are reserved for other models than this one and not touched."""
    others, own, sizes = f"/memfd:{_RESERVED}", f"/memfd:{_reserved(model)} (deleted)", dict[int, int]()
    for file in glob.iglob("/proc/[0-9]*/fd/*"):
        try:
            if (name := os.readlink(file)).startswith(others) and name != own:
                state = os.stat(file)
                sizes[state.st_ino] = state.st_size  # once, also if a child process inherited it
        except OSError:  # closed meanwhile, or another user's
            continue
    return sum(sizes.values())


def _reserved(model: str) -> str:
    return _RESERVED + model[-_NAME_CHARACTERS:]


def held_bytes(device: torch.device) -> int:
    """Memory held now: by tensors on a GPU, otherwise by this process."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    try:
        return int(os.pread(_statm(os.getpid()), 128, 0).split()[1]) * mmap.PAGESIZE
    except OSError:  # there is no such file here
        return int(psutil.Process().memory_info().rss)


@functools.cache
def _statm(_: int) -> int:
    """The descriptor of a file with this process's memory, kept: the engine reads it in every step."""
    return os.open("/proc/self/statm", os.O_RDONLY)


def held_and_peak(device: torch.device) -> tuple[int, int]:
    """Memory held now, and the most held since the last call on a GPU; elsewhere the former twice."""
    if device.type == "cuda":
        allocated = torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]
        torch.cuda.reset_peak_memory_stats(device)
        return allocated["current"], allocated["peak"]
    return (held_bytes(device),) * 2


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error means that memory ran out; torch has no exception type for it on a CPU."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and any(words in text for words in _NO_MEMORY)


def is_broken(error: Exception) -> bool:
    """Whether a GPU has failed, such as by an illegal access: all that this process does on it then fails, too."""
    if not any(words in str(error) for words in _FAULT) or is_out_of_memory(error):
        return False
    if torch.cuda.is_available():
        with contextlib.suppress(RuntimeError):
            torch.cuda.synchronize()
            return False  # a wrong argument, for example
    return True


def describe(device: torch.device, error: Exception) -> str:
    """Allocated, reserved and requested memory as text."""
    asked = _ASKED.search(str(error))
    reserved = torch.cuda.memory_reserved(device) if device.type == "cuda" else psutil.Process().memory_info().vms
    held = f"{mib(held_bytes(device))} allocated, {mib(reserved)} reserved"
    return f"{held}, {asked[1] if asked else 'an unknown size'} asked for, {mib(free_bytes(device))} free"


def mib(size: int) -> str:
    """A size as text."""
    return f"{size / 2**20:.1f} MiB"
