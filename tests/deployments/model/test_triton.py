"""The kernels in Triton give the formulas' numbers and compile for GPUs; without Triton, torch stands in."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import deployments.model
from deployments.model import fast_layers, native
from deployments.model.attention import triton_decode
from deployments.model.attention.triton_decode import Kind, unusable
from tests.deployments.conftest import DEVICE

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[3]


def in_process(*arguments, **env):
    """Runs Python in a process whose Triton may interpret kernels, which this one's must not."""
    env = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT), **env}
    command = [sys.executable, *map(str, arguments)]
    ran = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert ran.returncode == 0, ran.stdout


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_kernels_give_the_formulas_numbers():
    options = ["--noconftest", "--tb=short", "-p", "no:cacheprovider"]
    interpret = "0" if DEVICE.startswith("cuda") else "1"
    in_process("-m", "pytest", *options, HERE / "triton_checks.py", TRITON_INTERPRET=interpret)


@pytest.mark.long
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_they_compile_for_gpus_once_for_all_numbers_of_rows(tmp_path):
    in_process("-W", "ignore", HERE / "triton_compiled.py", TRITON_CACHE_DIR=str(tmp_path))


def test_without_triton_torchs_operations_stand_in(monkeypatch, caplog):
    kernels = functools.cache(native.triton_kernels.__wrapped__)
    for module in (triton_decode, fast_layers):
        monkeypatch.setattr(module, "triton_kernels", kernels)
    monkeypatch.setitem(sys.modules, "deployments.model.triton_kernels", None)
    monkeypatch.delattr(deployments.model, "triton_kernels", raising=False)
    nowhere = torch.device("cuda", 99)
    assert unusable(Kind(nowhere, torch.float16, 8, 2, 64, 64)) == "Triton is not installed"
    assert not fast_layers._runs_triton(nowhere, torch.float16, 64)
    assert caplog.text.count("Triton cannot be imported") == 1
