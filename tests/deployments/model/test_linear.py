"""Linear layers multiplied by oneDNN give the values of transformers', and only where that is on."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from deployments.model import fast_layers
from deployments.model.batch import Batch, SequenceKv, TokenSpan
from deployments.model.fast_layers import SIZES, Switch, replace_linear_layers
from deployments.model.kv_cache import PagedCache
from deployments.model.packing import relative_error
from deployments.tiles import TILE

pytestmark = [pytest.mark.cpu, pytest.mark.skipif(not fast_layers.AVAILABLE, reason="oneDNN is not used here")]
ROWS = (0, 1, 3, 32, 100, SIZES[-1], SIZES[-1] + 1, 3 * SIZES[-1] - 5)


class Layers(nn.Module):
    """One layer of each kind, a layer that computes something of its own, and an empty one."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first, self.second, self.own = nn.Linear(48, 80), Conv1D(24, 80), Doubled(24, 8, bias=False)
        with pytest.warns(UserWarning, match="zero-element"):
            self.none = nn.Linear(8, 0)
        self.to(dtype).requires_grad_(False)
        nn.init.normal_(self.second.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(self.second(self.first(input=x) if x.requires_grad else self.first(x)))


class Doubled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_those_of_the_module_and_a_tile_has_the_same_bits_without_memory_for_copies(monkeypatch, dtype):
    module = Layers(dtype)
    plain, poor = copy.deepcopy(module), copy.deepcopy(module)
    switch = Switch()
    replace_linear_layers(module, "m", switch)
    monkeypatch.setattr(fast_layers, "SHARE", 0)
    replace_linear_layers(poor, "m", switch)
    for rows in ROWS:
        x = torch.randn(rows, 96, dtype=dtype)[None, :, ::2]  # not contiguous
        with switch.turned_on():
            found, other = module(x), poor(x)
        assert rows != TILE or torch.equal(found, other)
        for one in (found, other):
            assert relative_error(one, plain(x)) < (1e-6 if dtype == torch.float32 else 1e-2)


def test_outside_the_engine_they_are_the_modules_own_and_can_be_differentiated():
    module = Layers(torch.float32)
    plain, switch = copy.deepcopy(module), Switch()
    replace_linear_layers(module, "m", switch)
    x = torch.randn(5, 48, requires_grad=True)
    with pytest.raises(ZeroDivisionError), switch.turned_on(), switch.turned_on():
        1 / 0  # noqa: B018
    assert torch.equal(module(x), plain(x))
    module(x).sum().backward()
    assert x.grad.abs().sum() > 0


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_forward_passes_and_the_lens_multiply_by_onednn(tiny, name, monkeypatch):
    def refuse(*_):
        raise AssertionError("torch's own product")

    model = tiny(name)
    monkeypatch.setattr(nn.functional, "linear", refuse)
    monkeypatch.setattr(torch, "addmm", refuse)
    with torch.inference_mode():
        batch = Batch([3, 4, 5], [TokenSpan(SequenceKv([0]), 0, 3)], [2], model.device)
        assert model.forward(batch, PagedCache(1)).isfinite().all()
        assert model.unembedding.logits(torch.randn(2, model.config.hidden_size)).isfinite().all()


def test_few_numbers_of_rows_reach_onednn_which_keeps_code_for_each(monkeypatch):
    seen = set()

    def product(x, weight, bias, *_):
        seen.add(x.numel() // x.shape[-1])
        return x.new_zeros(*x.shape[:-1], weight.shape[0])

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", SimpleNamespace(default=product))
    module = nn.Linear(4, 4).requires_grad_(False)
    switch = Switch()
    replace_linear_layers(module, "m", switch)
    with switch.turned_on():
        for rows in (*range(1, 1100), 5000):
            assert module(torch.randn(rows, 4)).shape == (rows, 4)
    assert seen == set(SIZES)
    assert len(SIZES) <= 50


def test_copies_for_which_memory_runs_out_are_left_out(monkeypatch):
    def refuse(*_):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", refuse)
    module = nn.Linear(4, 4).requires_grad_(False)
    switch, x = Switch(), torch.randn(3, 4)
    replace_linear_layers(module, "m", switch)
    with switch.turned_on():
        torch.testing.assert_close(module(x), nn.functional.linear(x, module.weight, module.bias))
