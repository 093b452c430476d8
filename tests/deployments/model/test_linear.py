"""Linear layers multiplied by oneDNN give the values of transformers', and only where that is on."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from deployments.model import linear
from deployments.model.linear import LinearLayers
from deployments.model.packing import relative_error

pytestmark = pytest.mark.skipif(not linear.AVAILABLE, reason="oneDNN is not used here")


class Two(nn.Module):
    """One layer of each kind, and a layer that computes something of its own."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first, self.second, self.own = nn.Linear(48, 80), Conv1D(24, 80), Doubled(24, 8)
        self.to(dtype).requires_grad_(False)
        nn.init.normal_(self.second.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(self.second(self.first(x)))


class Doubled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize("share", [0, 1], ids=["weights as they are", "copies"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_those_of_the_module(monkeypatch, dtype, share):
    monkeypatch.setattr(linear, "SHARE", share)
    module = Two(dtype)
    plain, layers = copy.deepcopy(module), LinearLayers(module)
    for rows in (0, 1, 32, 100):
        x = torch.randn(rows, 96, dtype=dtype)[None, :, ::2]  # not contiguous
        with layers.used():
            assert relative_error(module(x), plain(x)) < (1e-6 if dtype == torch.float32 else 1e-2)


def test_outside_the_engine_they_are_the_modules_own_and_can_be_differentiated():
    module = Two(torch.float32)
    plain, layers = copy.deepcopy(module), LinearLayers(module)
    x = torch.randn(5, 48, requires_grad=True)
    with layers.used():
        pass
    assert torch.equal(module(x), plain(x))
    module(x).sum().backward()
    assert x.grad.abs().sum() > 0
