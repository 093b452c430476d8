"""Threads that wait for each other leave the processor to other processes, unless the operator says otherwise."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

CODE = "import ctypes, deployments; ctypes.CDLL({!r})"  # torch loads the same file, and takes seconds


@pytest.mark.parametrize(
    ("operators", "count"),
    [({}, "3000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "passive"}, "0")],
)
def test_torch_is_told_how_long_to_wait(operators: dict[str, str], count: str) -> None:
    unset = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    env = unset | operators | {"OMP_DISPLAY_ENV": "verbose"}
    torch = find_spec("torch")
    assert torch
    assert torch.origin
    openmp = Path(torch.origin).parent / "lib" / "libgomp.so.1"
    if not openmp.exists():
        pytest.skip("torch brings no OpenMP of GNU's")
    code = [sys.executable, "-c", CODE.format(str(openmp))]
    said = subprocess.run(code, env=env, capture_output=True, text=True, check=True, timeout=60).stderr
    assert f"GOMP_SPINCOUNT = '{count}'" in said
