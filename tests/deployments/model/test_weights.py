"""Shared weights: other processes see the same numbers and cannot change them."""

from __future__ import annotations

import os
import pickle

import pytest
import torch

from deployments.model.weights import SharedWeights

FEW = ["qwen3", "gpt2"]  # with and without tied weights
IDS = torch.arange(3, 20)[None]

pytestmark = pytest.mark.cpu


def mapped(hf):
    """What another process makes of a module, and the module."""
    shared = SharedWeights.of(hf.eval())
    there = pickle.loads(pickle.dumps(shared))  # noqa: S301 - as it travels
    return there.module(there.mapped(shared.fd)), shared


def test_every_architecture_gives_the_same_bits_on_mapped_weights(build, architecture):
    hf = build(architecture, torch.bfloat16)
    with torch.no_grad():
        before = hf(IDS).logits
        other, _ = mapped(hf)
        assert torch.equal(hf(IDS).logits, other(IDS).logits)
    torch.testing.assert_close(hf(IDS).logits, before)


@pytest.mark.parametrize("name", FEW)
def test_what_is_done_to_mapped_weights_stays_there(build, name):
    hf = build(name)
    other, _ = mapped(hf)
    before = hf(IDS).logits
    with torch.no_grad():
        for weight in other.parameters():
            weight.zero_()
    assert torch.equal(hf(IDS).logits, before)
    assert not other(IDS).logits.any()


@pytest.mark.parametrize("name", FEW)
def test_tied_weights_stay_tied_and_can_be_differentiated(build, name):
    hf = build(name)
    other, _ = mapped(hf.requires_grad_(False))
    for path, weight in hf.named_parameters(remove_duplicate=False):
        twins = [twin for twin, found in hf.named_parameters(remove_duplicate=False) if found is weight]
        there = dict(other.named_parameters(remove_duplicate=False))
        assert all(there[twin] is there[path] for twin in twins)
    other(IDS).logits.sum().backward()
    assert other.get_input_embeddings().weight.grad is not None


@pytest.mark.parametrize("name", FEW)
def test_the_file_lets_nobody_write(build, name):
    hf = build(name)
    _, shared = mapped(hf)
    with pytest.raises(PermissionError):
        os.write(os.open(f"/proc/self/fd/{shared.fd}", os.O_RDWR), b"x")
    with pytest.raises(PermissionError):
        os.ftruncate(shared.fd, 0)
    with pytest.raises(RuntimeError, match="mmap"):
        torch.UntypedStorage.from_file(f"/proc/self/fd/{shared.fd}", True, shared.size)
