"""What the machine does at best: copies, launches and matrix products; and the libraries' versions."""

from __future__ import annotations

import importlib.metadata
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.common import measured_models
from benchmarks.common.harness import ROOT, synchronize
from benchmarks.gpu.case import Found, Plan

PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "pydantic", "triton", "nvidia-cudnn-cu13")
TESTS = [f"tests/deployments/{name}" for name in ("engine", "model", "places")]


def seconds(work: Callable[[], Any], device: str, calls: int = 10, turns: int = 5) -> float:
    """The median of a few turns' seconds for each call."""
    work()
    found = []
    for _ in range(turns):
        synchronize(device)
        began = time.perf_counter()
        for _ in range(calls):
            work()
        synchronize(device)
        found.append((time.perf_counter() - began) / calls)
    return statistics.median(found)


def bandwidth(device: str) -> float:
    """Bytes per second of a copy on the device, read and written."""
    source = torch.randint(255, (2**30 if torch.device(device).type == "cuda" else 2**24,), dtype=torch.uint8)
    source = source.to(device)
    target = torch.empty_like(source)
    return 2 * len(source) / seconds(lambda: target.copy_(source), device)


def machine(plan: Plan) -> Found:
    """Versions, copies, launches and matrix products."""
    cuda, device = torch.device(plan.device).type == "cuda", plan.device
    versions = {one.name: one.version for one in importlib.metadata.distributions() if one.name in PACKAGES}
    yield "versions", versions | {"cuda": torch.version.cuda}
    rates = {"on the device": bandwidth(device)}
    size = 2**28 if cuda else 2**20
    on_device = torch.randint(255, (size,), dtype=torch.uint8, device=device)
    for name in ("pageable", "pinned") if cuda else ("pageable",):
        host = torch.empty(size, dtype=torch.uint8, pin_memory=name == "pinned")
        up, down = (lambda host=host: on_device.copy_(host)), (lambda host=host: host.copy_(on_device))
        rates |= {f"{name}, up": size / seconds(up, device, 2), f"{name}, down": size / seconds(down, device, 2)}
    yield "copy, bytes/s", rates
    one = torch.ones(64, device=device)
    yield (
        "microseconds",
        {
            "launch": 1e6 * seconds(lambda: one.add_(1), device, 1000),
            "launch and wait": 1e6 * seconds(lambda: one.sum().item(), device, 100),
        },
    )
    yield from _products(plan)


def _products(plan: Plan) -> Found:
    """Milliseconds of all products of a forward pass with linear layers, and TFLOP/s, by number of rows."""
    dtype = torch.float32 if plan.tiny else torch.bfloat16
    for size in ("tiny",) if plan.tiny else ("qwen3-0.6b", "qwen3-8b"):
        shape = measured_models.SHAPES[size]
        hidden, inner = shape["hidden_size"], shape["intermediate_size"]
        attending, kept = (shape[name] * shape["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
        sizes = [(hidden, attending), (hidden, kept), (hidden, kept), (attending, hidden)]
        sizes += [(hidden, inner), (hidden, inner), (inner, hidden)]
        # Several layers, so that weights come from memory rather than from a cache.
        layers = [
            [torch.randn(b, a, dtype=dtype, device=plan.device) for a, b in sizes] for _ in range(2 if plan.tiny else 8)
        ]
        for rows in (*plan.rows, 16 if plan.tiny else 4096):
            inputs = {a: torch.randn(rows, a, dtype=dtype, device=plan.device) for a, _ in sizes}

            def run(layers: Any = layers, inputs: Any = inputs) -> None:
                for layer in layers:
                    for weight in layer:
                        torch.nn.functional.linear(inputs[weight.shape[1]], weight)

            took = seconds(run, plan.device, 2) / len(layers) * shape["num_hidden_layers"]
            flops = 2 * rows * sum(a * b for a, b in sizes) * shape["num_hidden_layers"]
            yield f"products of {size}, {rows} rows", {"ms": 1e3 * took, "TFLOP/s": flops / took / 1e12}


def tests(plan: Plan) -> Found:
    """The engine's own tests with the models on the device: how many passed, and the names of those that failed."""
    command = [sys.executable, "-m", "pytest", "--confcutdir=tests/deployments", "-q", "-n", str(os.cpu_count())]
    command += ["-m", "not long and not server and not slow", "-W", "default", "-p", "no:cacheprovider", *TESTS]
    if plan.tiny:
        command = [*command[:4], "-q", "tests/deployments/engine/test_endings.py"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "VITRINE_TEST_DEVICE": plan.device}, capture_output=True, text=True
    )
    lines = done.stdout.splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    summary = next(
        (line for line in reversed(lines) if re.search(r"\d+ (passed|failed|error)", line)), done.stderr[-500:]
    )
    yield "engine's tests", {"summary": summary, "failed": failed, "ok": done.returncode == 0}
