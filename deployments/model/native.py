"""The functions in C for CPUs, compiled at first use and cached on disk, and those in Triton for GPUs."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

SOURCES = tuple(Path(__file__).with_name(name) for name in ("vectors.h", "paged_attention.c", "rms_norm.c"))
FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-fopenmp", "-fPIC", "-shared")
KINDS: dict[torch.dtype, tuple[str, ...]] = {torch.float32: (), torch.bfloat16: ("-DHALF",)}
TIMEOUT_S = 120  # for the compiler

logger = logging.getLogger(__name__)


class Call(ctypes.Structure):
    """The kernel's arguments; `paged_attention.c` documents each field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "keys", "values", "out", "sinks")),
        *((name, ctypes.c_void_p) for name in ("position", "table", "pages", "units")),
        *((name, ctypes.c_int64) for name in ("query_row", "query_head", "key_row", "key_head")),
        *((name, ctypes.c_int64) for name in ("value_row", "value_head")),
        *((name, ctypes.c_int32) for name in ("rows", "unit_count", "heads", "kv_heads", "head_dim")),
        *((name, ctypes.c_int32) for name in ("value_width", "value_dim", "window", "chunk", "threads")),
        *((name, ctypes.c_float) for name in ("scaling", "softcap")),
    )


def attention_kernel(dtype: torch.dtype) -> Callable[[Any], int] | None:
    """`paged_attention` for keys and values of a dtype; None for another dtype or without a compiler."""
    library = _library(dtype)
    return library.paged_attention if library else None


def rms_norm_kernel(dtype: torch.dtype) -> Callable[..., None] | None:
    """`rms_norm` for rows of a dtype; None for another dtype or without a compiler."""
    library = _library(dtype)
    return library.rms_norm if library else None


@functools.cache
def triton_kernels() -> Any | None:
    """The module `triton_kernels`, imported at first use; None where Triton is not installed."""
    try:
        from deployments.model import triton_kernels as kernels
    except ImportError as error:
        logger.warning("Triton cannot be imported, so torch's slower operations are used: %s", error)
        return None
    return kernels


def worthwhile_threads(work: int, of_one: int) -> int:
    """The number of threads that are worth starting: one more for each `of_one` units of work, at most torch's."""
    return min(torch.get_num_threads(), 1 + work // of_one)


@functools.cache
def _library(dtype: torch.dtype) -> ctypes.CDLL | None:
    """The compiled functions for numbers of a dtype; None where torch's slower operations do their work."""
    if dtype not in KINDS:
        return None
    try:
        library = ctypes.CDLL(str(_built(KINDS[dtype])))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: no home directory
        message = getattr(error, "stderr", None)
        logger.warning("the kernels could not be compiled, so torch's slower operations are used: %s", message or error)
        return None
    library.paged_attention.argtypes = [ctypes.POINTER(Call)]
    tensors, numbers = [ctypes.c_void_p] * 3, [ctypes.c_int64] * 2
    library.rms_norm.argtypes = [*tensors, *numbers, ctypes.c_float, ctypes.c_int32, ctypes.c_int32]
    library.rms_norm.restype = None
    return library


def _built(flags: tuple[str, ...]) -> Path:
    """The library for these sources, compiler and processor."""
    compiler = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
    if compiler is None:
        raise FileNotFoundError("there is no C compiler: install gcc or clang")
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, text=True, timeout=TIMEOUT_S)
    sources = [source.read_text() for source in SOURCES]
    parts = *sources, version.stdout, *FLAGS, *flags, platform.machine(), _processor()
    name = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vitrine"
    built = folder / f"kernels-{name}.so"
    if not built.exists():
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:  # a concurrent process replaces it by the same file
            made = Path(scratch) / "kernels.so"
            compiled = [str(source) for source in SOURCES if source.suffix == ".c"]
            command = [compiler, *FLAGS, *flags, "-o", str(made), *compiled, "-lm"]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT_S)
            made.replace(built)
    return built


def _processor() -> str:
    """The processor's features: machines that differ may share a home directory."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return platform.processor()
