"""Tests whether sequences of a loaded model may share a forward pass; rejects a model with wrong results either way.

With batch invariance, a sequence gets the same bits alone and in any batch. Libraries choose the order of a sum by the
shape of a matrix product, so linear layers then multiply rows in tiles of one fixed size. The attention kernel computes
each row by itself. Elementwise functions treat the end of a loop differently, so each row is padded to whole vectors.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, islice, pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from deployments.model.batch import PAGE, Batch, SequenceKv, TokenSpan
from deployments.model.device_memory import is_broken, is_out_of_memory
from deployments.model.kv_cache import PagedCache
from deployments.model.native import attention_kernel
from deployments.tiles import in_tiles

TOLERANCE = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}  # relative to the logits' norm
PROBE_LENGTHS = (9, 4, 6)  # of the prompts
PROBE_WINDOW = 3  # tokens of an attention window during the test, fewer than in the prompts
LENGTHS = ("sliding_window", "attention_chunk_size", "floor_scale")  # fields with lengths that the test shortens
# Other fields with windows in some architectures: a probe shorter than the window would not reveal it.
OTHER_WINDOWS = ("window_size", "keep_window_size", "sliding_window_size")
ACTIVATIONS = "transformers.activations"  # all of its classes are elementwise
ELEMENTWISE = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Sigmoid, nn.LogSigmoid),
    *(nn.Tanh, nn.Hardtanh, nn.Hardsigmoid, nn.Hardswish, nn.Softplus, nn.Softsign, nn.Tanhshrink),
)
VECTOR = 64  # the most numbers that torch's elementwise loops take at once; a remainder is computed differently
SINGLE_THREAD_NUMBERS = 32768  # numbers up to which such a loop uses one thread
INVARIANCE_LENGTHS = (6, 1, 9)  # of the prompts of its test, besides a long one
MOST_PROBED = 256  # tokens of the long one

Part = tuple[SequenceKv, int, Sequence[int]]  # tokens of a sequence from a position on


class UnsupportedModelError(ValueError):
    """This engine cannot serve the model exactly; the message has the reason."""


@torch.inference_mode()
def find_packing(model: Any) -> None:
    """Set whether a model's sequences share forward passes: if each then has the result of a plain forward pass alone.

    Others run one at a time through transformers' own cache. UnsupportedModelError if that gives wrong results, too.
    """
    tried = []
    has_other_window = any(getattr(model.config, field, None) for field in OTHER_WINDOWS)
    ways = [(True, False), (True, True)] if model.mixers.paths else [(True, False)]
    for model.packs, model.mixers.stepwise in [*([] if has_other_window else ways), (False, False)]:
        with shortened(model.hf):
            if (failed := _failure(model)) is None:
                return
        tried.append(f"{'together' if model.packs else 'one at a time'}: {failed}")
    raise UnsupportedModelError(f"{type(model.hf).__name__} cannot be served exactly: {'; '.join(tried)}")


def _failure(model: Any) -> str | None:
    """Why prompts cannot run as in the engine; None if they can."""
    prompts = [[(7 * i + 3 * n) % model.vocabulary for i in range(n)] for n in PROBE_LENGTHS]
    alone = [_alone(model, prompt) for prompt in prompts]
    try:
        if model.packs:
            # Single tokens and a chunk, after chunks.
            together, *_ = _together(model, prompts, [*(len(prompt) - 1 for prompt in prompts[:-1]), 2])
        else:
            together = torch.stack([_in_chunks(model, prompt) for prompt in prompts])
    except (TypeError, ValueError, RuntimeError, AttributeError, LookupError, AssertionError) as error:
        if is_out_of_memory(error) or is_broken(error):
            raise
        return f"{type(error).__name__}: {error}"  # architectures reject unsupported arguments with various errors
    worst = max(relative_error(a, b) for a, b in zip(together, alone, strict=True))
    tolerance = TOLERANCE.get(model.dtype, 1e-1)
    if worst > tolerance:
        return f"logits differ from a lone forward's by {worst:.1%} of their norm"
    if model.packs and model.mixers.paths:  # in a small random model, a lost state changes the logits little
        _, cache, held = _together(model, [prompts[0]] * 2, [0, len(prompts[0]) // 2])
        whole, pieces = (cache.states.of(kv.slot) for kv in held)
        if (worst := max(map(relative_error, pieces, whole))) > tolerance:
            return f"the states after a prompt in pieces differ by {worst:.1%} of their norm"
    return None


def _alone(model: Any, prompt: list[int]) -> torch.Tensor:
    """[vocabulary] logits of the prompt's last token in a plain forward pass."""
    ids = torch.tensor([prompt], device=model.device)
    return model.hf(input_ids=ids, use_cache=False).logits[0, -1]  # type: ignore[no-any-return]


def _together(
    model: Any, prompts: Sequence[Sequence[int]], cuts: Sequence[int]
) -> tuple[torch.Tensor, PagedCache, list[SequenceKv]]:
    """[prompts, vocabulary] the same of all, after a forward pass of the tokens before the cuts; and their memory."""
    sizes = [-(-len(prompt) // PAGE) for prompt in prompts]
    cache, pages = model.new_cache(sum(sizes), len(prompts) + 1), iter(range(sum(sizes)))
    held = [SequenceKv(islice(pages, size), slot) for slot, size in enumerate(sizes, 1)]
    parts = [*zip(held, cuts, prompts, strict=True)]
    if any(cuts):
        last_logits(model, cache, [(kv, 0, prompt[:cut]) for kv, cut, prompt in parts if cut])
    return last_logits(model, cache, [(kv, cut, prompt[cut:]) for kv, cut, prompt in parts]), cache, held


def _in_chunks(model: Any, prompt: Sequence[int]) -> torch.Tensor:
    """[vocabulary] the same of one prompt in three chunks, the last of which is a single token."""
    cache, kv, cuts = model.new_cache(), SequenceKv(), (0, 2, len(prompt) - 1, len(prompt))
    for start, stop in pairwise(cuts):
        logits = last_logits(model, cache, [(kv, start, prompt[start:stop])])
    return logits[0]


def last_logits(model: Any, cache: PagedCache, parts: Sequence[Part]) -> torch.Tensor:
    """[parts, vocabulary] logits of the last token of each part, all of them in one forward pass."""
    spans = [TokenSpan(kv, start, len(ids)) for kv, start, ids in parts]
    ends = [end - 1 for end in accumulate(span.count for span in spans)]
    batch = Batch([id for *_, ids in parts for id in ids], spans, ends, model.device)
    return model.forward(batch, cache)  # type: ignore[no-any-return]


def relative_error(a: torch.Tensor, b: torch.Tensor) -> float:
    """The distance of a from b, relative to b's norm."""
    return float((a.float() - b.float()).norm() / b.float().norm().clamp_min(1e-9))


@contextmanager
def shortened(model: nn.Module, fields: Sequence[str] = LENGTHS) -> Iterator[None]:
    """Set a model's windows, or other such fields, to PROBE_WINDOW here: a few tokens then show whether it has them.

    Some configs state a window that their model does not have. Modules may have copied their config's value.
    """
    owners: dict[int, Any] = {
        id(owner): owner for module in model.modules() for owner in (module, getattr(module, "config", None))
    }
    stated = [(owner, field, getattr(owner, field, None)) for owner in owners.values() for field in fields]
    stated = [(owner, field, length) for owner, field, length in stated if isinstance(length, int) and length]
    try:
        for owner, field, _ in stated:
            setattr(owner, field, PROBE_WINDOW)
        yield
    finally:
        for owner, field, length in stated:
            setattr(owner, field, length)


# ---- batch invariance


@torch.inference_mode()
def make_batch_invariant(model: Any) -> None:
    """Change a model so that each row has the same bits whatever the other rows of a forward pass, and test it.

    UnsupportedModelError if something in it computes in an order that depends on other rows.
    """
    hf = model.hf
    if not model.packs:
        raise UnsupportedModelError("batch_invariant needs a model whose sequences share forwards; this one's do not")
    if model.has_states:
        raise UnsupportedModelError("batch_invariant does not hold for layers with a state, such as convolutions")
    if hf.device.type != "cpu" or attention_kernel(hf.dtype) is None:
        raise UnsupportedModelError(
            "batch_invariant needs the attention kernel: a CPU, float32 or bfloat16, and a C compiler (cc)"
        )
    rows = 2 * SINGLE_THREAD_NUMBERS // hf.get_input_embeddings().embedding_dim + 3
    long = min(MOST_PROBED, model.context, rows)
    prompts = [[(7 * i + 3 * n) % model.vocabulary for i in range(n)] for n in (*INVARIANCE_LENGTHS, long)]
    cuts = [0] * len(INVARIANCE_LENGTHS) + [long // 2]  # the rows of the long one's second part are behind the others'
    with shortened(hf, ["floor_scale"]):
        before, *_ = _together(model, prompts, cuts)
        _change(hf)
        logits, cache, held = _together(model, prompts, cuts)
        alone = [_together(model, [prompt], [0]) for prompt in prompts]
    if (differing := relative_error(logits, before)) > TOLERANCE[model.dtype]:
        message = f"it changes the logits by {differing:.1%} of their norm"
        raise UnsupportedModelError(f"batch_invariant does not hold for {type(hf).__name__}: {message}")
    for row, kv, prompt, (own, its_cache, (its_kv,)) in zip(logits, held, prompts, alone, strict=True):
        count = len(prompt)
        if not all(map(torch.equal, (row, *cache.of(kv, count)), (own[0], *its_cache.of(its_kv, count)))):
            message = "its rows' bits depend on the rows beside them, by an operation that is no module"
            raise UnsupportedModelError(f"batch_invariant does not hold for {type(hf).__name__}: {message}")


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
