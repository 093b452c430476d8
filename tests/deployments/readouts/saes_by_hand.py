"""Readouts made for tests, as the bytes of their files."""

from __future__ import annotations

import json
from typing import Any

import torch
from safetensors.torch import save

from deployments.readouts.files import Definition, define


def linear(hidden: int, count: int = 1, seed: int = 0, **spec: Any) -> bytes:
    """A calibrated probe of random weights."""
    random = torch.Generator().manual_seed(seed)
    tensors = {
        "weight": torch.randn(count, hidden, generator=random),
        "bias": torch.randn(count, generator=random),
        "mean": torch.randn(hidden, generator=random),
        "std": torch.rand(hidden, generator=random) + 0.5,
        "slope": torch.rand(count, generator=random) + 0.5,
        "offset": torch.randn(count, generator=random),
    }
    said = {"name": "truth", "model": "demo", "point": "layers.1.output", "kind": "linear", "activation": "sigmoid"}
    return save(tensors, {"spec": json.dumps(said | spec)})


def sae(hidden: int, count: int, activation: str = "relu", seed: int = 0, **spec: Any) -> bytes:
    """An autoencoder of random weights."""
    random = torch.Generator().manual_seed(seed)
    tensors = {
        "W_enc": torch.randn(hidden, count, generator=random) / hidden**0.5,
        "W_dec": torch.randn(count, hidden, generator=random),
        "b_enc": torch.randn(count, generator=random) / 4,
        "b_dec": torch.randn(hidden, generator=random) / 4,
    }
    if activation == "jumprelu":
        tensors["threshold"] = torch.rand(count, generator=random)
    if activation == "gated":
        del tensors["b_enc"]
        tensors |= {name: torch.randn(count, generator=random) / 4 for name in ("b_gate", "b_mag", "r_mag")}
    said = {"name": "sae", "model": "demo", "point": "layers.1.output", "kind": "sae", "activation": activation}
    said |= {"k": 5} if activation == "topk" else {}
    return save(tensors, {"spec": json.dumps(said | spec)})


def definition(data: bytes) -> Definition:
    """What a file defines."""
    return define(data)
