"""The attention kernel for CPUs: compiled by the machine's C compiler at first use, and cached on disk."""

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

SOURCE = Path(__file__).with_name("paged_attention.c")
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
        *((name, ctypes.c_int32) for name in ("value_width", "value_dim", "window", "threads")),
        *((name, ctypes.c_float) for name in ("scaling", "softcap")),
    )


@functools.cache
def kernel(dtype: torch.dtype) -> Callable[[Any], int] | None:
    """The compiled function for keys and values of a dtype.

    Returns:
        The function; None for another dtype or without a compiler. Attention then uses torch and is slower.
    """
    if dtype not in KINDS:
        return None
    try:
        function = ctypes.CDLL(str(_built(KINDS[dtype]))).paged_attention
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: no home directory
        said = getattr(error, "stderr", None)
        logger.warning(
            "the attention kernel could not be compiled, so torch's slower operations are used: %s", said or error
        )
        return None
    function.argtypes, function.restype = [ctypes.POINTER(Call)], ctypes.c_int
    return function


def _built(flags: tuple[str, ...]) -> Path:
    """The library for this source, compiler and processor.

    Raises:
        OSError: There is no compiler, or no directory to write to.
        subprocess.SubprocessError: The compiler failed.
    """
    compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
    if compiler is None:
        raise FileNotFoundError("there is no C compiler: install gcc or clang")
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, text=True, timeout=TIMEOUT_S)
    parts = (SOURCE.read_text(), version.stdout, *FLAGS, *flags, platform.machine(), _processor())
    name = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vitrine"
    built = folder / f"attention-{name}.so"
    if not built.exists():
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:  # a concurrent process replaces it by the same file
            made = Path(scratch) / "attention.so"
            command = [compiler, *FLAGS, *flags, "-o", str(made), str(SOURCE), "-lm"]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT_S)
            made.replace(built)
    return built


def _processor() -> str:
    """The processor's features: machines that differ may share a home directory."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return platform.processor()
