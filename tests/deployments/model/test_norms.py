"""RMS norms by the compiled function give the values of transformers', and only where they are turned on."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from deployments.model.fast_layers import Switch, replace_rms_norms
from deployments.model.native import rms_norm_kernel

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.skipif(rms_norm_kernel(torch.float32) is None, reason="there is no C compiler"),
]
SIZES = (7, 64, 100, 576)


class OutlierRMSNorm(LlamaRMSNorm):
    """One that treats a single feature differently."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        y[..., 0] *= 50
        return y


class GatedRMSNorm(LlamaRMSNorm):
    """One that needs another input."""

    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x) * gate.sigmoid()


class CentredRMSNorm(nn.LayerNorm):
    """One that is none."""


def norms_of(make, dtype):
    """Norms of all sizes with weights of their own."""
    module = nn.ModuleList([make(size) for size in SIZES]).to(dtype).requires_grad_(False)
    for norm in module:
        nn.init.normal_(norm.weight)
    return module


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [LlamaRMSNorm, Gemma2RMSNorm, Olmo2RMSNorm, lambda size: nn.RMSNorm(size, 1e-5)])
def test_values_are_those_of_the_module_and_each_rows_bits_the_same_in_any_company(make, dtype):
    assert_values_and_bits(make, dtype, "cpu", count=300)


def assert_values_and_bits(make, dtype, device, count):
    module, switch = norms_of(make, dtype).to(device), Switch()
    plain = copy.deepcopy(module)
    replace_rms_norms(module, switch)
    for norm, own, size in zip(module, plain, SIZES, strict=True):
        assert "forward" in vars(norm)
        x = torch.randn(1, count, 2, 2 * size, dtype=dtype, device=device)[..., ::2]  # not contiguous
        x[0, : count // 3] *= 1e-3
        with torch.inference_mode(), switch.turned_on():
            found, alone = norm(x), norm(x[:, 17:18])
        wanted = own(x)
        assert found.shape == wanted.shape
        assert torch.equal(found[:, 17:18], alone)
        different = ~torch.isclose(found.float(), wanted.float(), rtol=1e-5, atol=0)
        assert different.float().mean() < 0.01
        torch.testing.assert_close(found, wanted, rtol=max(1e-5, 2 * torch.finfo(dtype).eps), atol=0)


def test_rows_of_another_width_are_refused_as_by_the_module():
    module, switch = norms_of(LlamaRMSNorm, torch.float32), Switch()
    replace_rms_norms(module, switch)
    with switch.turned_on(), pytest.raises(RuntimeError, match="must match the size"):
        module[-1](torch.randn(2, 2 * SIZES[-1]))


def test_outside_the_engine_they_are_the_modules_own_and_can_be_differentiated():
    module, switch = norms_of(LlamaRMSNorm, torch.float32), Switch()
    plain = copy.deepcopy(module)
    replace_rms_norms(module, switch)
    x = torch.randn(3, SIZES[-1], requires_grad=True)
    assert torch.equal(module[-1](x), plain[-1](x))
    module[-1](x).square().sum().backward()
    assert x.grad.abs().sum() > 0


@pytest.mark.parametrize("make", [OutlierRMSNorm, GatedRMSNorm, CentredRMSNorm, lambda size: nn.RMSNorm(size)])
def test_modules_that_compute_something_else_stay_as_they_are(make):
    module = norms_of(make, torch.float32)
    replace_rms_norms(module, Switch())
    assert not any("forward" in vars(norm) for norm in module)
