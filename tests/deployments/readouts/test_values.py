"""A readout's values are those of the formulas that it was trained by."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load

sys.path.append(str(Path(__file__).parent))  # importlib mode adds no folder
from saes_by_hand import linear, sae

from deployments.readouts.files import define
from deployments.readouts.values import Readout, Stack

CPU = torch.device("cpu")
HIDDEN, FEATURES = 24, 64


def rows(count: int = 9, massive: bool = False) -> torch.Tensor:
    found = torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(7))
    if massive:
        found[:, 3] += 3000  # as some entries of real models are
    return found


@pytest.mark.parametrize("massive", [False, True])
@pytest.mark.parametrize("activation", ["none", "sigmoid", "relu"])
def test_a_probe_gives_the_offline_probes_values_calibrated(activation: str, massive: bool) -> None:
    data = linear(HIDDEN, 3, activation=activation)
    held = {name: tensor.double() for name, tensor in load(data).items()}
    x = rows(massive=massive)
    logits = ((x.double() - held["mean"]) / held["std"]) @ held["weight"].T + held["bias"]
    want = held["slope"] * logits + held["offset"]
    want = {"none": want, "sigmoid": want.sigmoid(), "relu": want.relu()}[activation]
    got = Readout(define(data), CPU).encode(x)
    torch.testing.assert_close(got, want.float(), rtol=1e-5, atol=1e-5)


def test_readouts_of_a_point_side_by_side_give_what_each_gives_alone() -> None:
    alone = [Readout(define(linear(HIDDEN, count, seed)), CPU) for seed, count in enumerate((1, 3, 2))]
    x = rows()
    stack = Stack(alone)
    together = stack.values(x)
    for one in alone:
        first = stack.first[one]
        assert torch.equal(together[:, first : first + one.count], one.encode(x))


def features(held: dict[str, torch.Tensor], x: torch.Tensor, activation: str) -> torch.Tensor:
    """The formulas of Bricken et al. 2023 (relu), Rajamanoharan et al. 2024 (gated, jumprelu) and Gao et al. 2024."""
    if activation == "gated":
        opened = x @ held["W_enc"] + held["b_gate"] > 0
        return opened * (x @ (held["W_enc"] * held["r_mag"].exp()) + held["b_mag"]).clamp(min=0)
    found = x @ held["W_enc"] + held["b_enc"]
    if activation == "jumprelu":
        return torch.where(found > held["threshold"], found, 0.0).clamp(min=0)
    if activation == "topk":
        least = found.sort(dim=-1, descending=True).values[:, 4:5]
        return torch.where(found >= least, found, 0.0).clamp(min=0)
    return found.clamp(min=0)


@pytest.mark.parametrize("normalization", ["none", "layer_norm", "constant_norm_rescale"])
@pytest.mark.parametrize("taken_off", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gated", "jumprelu", "topk"])
def test_an_autoencoder_gives_the_papers_features(activation: str, taken_off: bool, normalization: str) -> None:
    data = sae(HIDDEN, FEATURES, activation, apply_b_dec_to_input=taken_off, normalize_activations=normalization)
    held, x = load(data), rows()
    if normalization == "layer_norm":
        x = (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-5)
    elif normalization == "constant_norm_rescale":
        x = x * HIDDEN**0.5 / x.norm(dim=-1, keepdim=True)
    want = features(held, x - held["b_dec"] if taken_off else x, activation)
    got = Readout(define(data), CPU).encode(rows())
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert (got > 0).any(), "an autoencoder that gives nothing shows nothing"
