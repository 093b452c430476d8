"""Batch invariance: a sequence gets the same bits alone and in any batch.

Libraries choose the order of a sum by the shape of a matrix product. Linear layers here multiply rows in tiles of one
fixed size, so that each row has the same bits whatever the other rows. The attention kernel computes each row by
itself. Elementwise functions treat the end of a loop differently, so each row is padded to whole vectors.
"""

from __future__ import annotations

import functools
from itertools import accumulate, repeat
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from deployments.model.batch import PAGE, SequenceKv
from deployments.model.kv_cache import PagedCache
from deployments.model.native import attention_kernel
from deployments.model.packing import TOLERANCE, UnsupportedModelError, last_logits, relative_error
from deployments.tiles import in_tiles

ACTIVATIONS = "transformers.activations"  # all of its classes are elementwise
ELEMENTWISE = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Sigmoid, nn.LogSigmoid),
    *(nn.Tanh, nn.Hardtanh, nn.Hardsigmoid, nn.Hardswish, nn.Softplus, nn.Softsign, nn.Tanhshrink),
)
VECTOR = 64  # the most numbers that torch's elementwise loops take at once; a remainder is computed differently
SINGLE_THREAD_NUMBERS = 32768  # numbers up to which such a loop uses one thread
PROBE_LENGTHS = (9, 1, 6)  # of prompts, besides a long one
MOST_PROBED = 256  # tokens of the long one


@torch.inference_mode()
def make_batch_invariant(model: Any) -> None:
    """Make each row of a model have the same bits whatever the other rows of a forward pass, and test it.

    Args:
        model: The `Model` of `model.py`; its Hugging Face module is changed in place.

    Raises:
        UnsupportedModelError: Something in it computes in an order that depends on other rows.
    """
    hf = model.hf
    if not model.packs:
        raise UnsupportedModelError("batch_invariant needs a model whose sequences share forwards; this one's do not")
    if hf.device.type != "cpu" or attention_kernel(hf.dtype) is None:
        raise UnsupportedModelError(
            "batch_invariant needs the attention kernel: a CPU, float32 or bfloat16, and a C compiler (cc)"
        )
    rows = 2 * SINGLE_THREAD_NUMBERS // hf.get_input_embeddings().embedding_dim + 3
    lengths = (min(MOST_PROBED, model.context, rows), *PROBE_LENGTHS)
    prompts = [[(7 * i + 3 * n) % model.vocabulary for i in range(n)] for n in lengths]
    before = _run(model, prompts, lengths[0] // 2)
    _change(hf)
    together, alone = _run(model, prompts, lengths[0] // 2), [_run(model, [prompt])[0] for prompt in prompts]
    differing = relative_error(*(torch.cat([probed.logits for probed in run]) for run in (together, before)))
    if differing > TOLERANCE[model.dtype]:
        message = f"it changes the logits by {differing:.1%} of their norm"
        raise UnsupportedModelError(f"batch_invariant does not hold for {type(hf).__name__}: {message}")
    for probed, other in zip(together, alone, strict=True):
        if not all(map(torch.equal, (probed.logits, *probed.kv), (other.logits, *other.kv))):
            message = "its rows' bits depend on the rows beside them, by an operation that is no module"
            raise UnsupportedModelError(f"batch_invariant does not hold for {type(hf).__name__}: {message}")


class _Probed(NamedTuple):
    """A prompt's result: [vocabulary] logits of its last token, and all layers' keys and values."""

    logits: torch.Tensor
    kv: list[torch.Tensor]


def _run(model: Any, prompts: list[list[int]], cut: int = 0) -> list[_Probed]:
    """Run prompts together, after a forward pass of `cut` tokens of the first."""
    sizes = [-(-len(prompt) // PAGE) for prompt in prompts]
    cache = PagedCache(sum(sizes))
    held = [SequenceKv(range(stop - size, stop)) for stop, size in zip(accumulate(sizes), sizes, strict=True)]
    if cut:
        last_logits(model, cache, [(held[0], 0, prompts[0][:cut])])
    parts = [(held[0], cut, prompts[0][cut:]), *zip(held[1:], repeat(0), prompts[1:], strict=False)]
    logits = last_logits(model, cache, parts[::-1])  # so that the first one's rows move
    return [_Probed(row, cache.of(kv, len(ids))) for row, kv, ids in zip(logits.flip(0), held, prompts, strict=True)]


def _change(hf: Any) -> None:
    """Replace linear layers and activations by functions that do not depend on other rows."""
    for name, module in hf.named_modules():
        if isinstance(module, (nn.Linear, Conv1D)):
            width = module.out_features if isinstance(module, nn.Linear) else module.nf
            module.forward = functools.partial(in_tiles, width=width, product=module.forward)  # type: ignore[method-assign]
        elif type(module).__module__ == ACTIVATIONS or isinstance(module, ELEMENTWISE):
            module.forward = functools.partial(_by_vectors, module.forward)
        elif any(weight.ndim > 2 for weight in module.parameters(recurse=False)):
            message = (
                f"batch_invariant does not hold for {name} ({type(module).__name__}), because it multiplies "
                "rows in groups"
            )
            raise UnsupportedModelError(message)


def _by_vectors(function: Any, x: torch.Tensor) -> torch.Tensor:
    """Apply an elementwise function to rows x [..., features], each number by the same vector instructions."""
    width = x.shape[-1]
    rows = functional.pad(x.reshape(-1, width), (0, -width % VECTOR))
    tiles = torch.split(rows, max(1, SINGLE_THREAD_NUMBERS // rows.shape[-1]))
    return torch.cat([function(tile) for tile in tiles])[:, :width].reshape(x.shape)
