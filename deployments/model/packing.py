"""Tests whether sequences of a loaded model may share a forward pass; rejects a model with wrong results either way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn

from deployments.model.batch import PAGE, Batch, SequenceKv, TokenSpan
from deployments.model.device_memory import is_broken, is_out_of_memory
from deployments.model.kv_cache import PagedCache

TOLERANCE = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}  # relative to the logits' norm
PROBE_LENGTHS = (9, 4, 6)  # of the prompts
PROBE_WINDOW = 3  # tokens of an attention window during the test, fewer than in the prompts
# Other fields with windows in some architectures: a probe shorter than the window would not reveal it.
OTHER_WINDOWS = ("window_size", "attention_chunk_size", "keep_window_size", "sliding_window_size")

Part = tuple[SequenceKv, int, Sequence[int]]  # tokens of a sequence from a position on


class UnsupportedModelError(ValueError):
    """This engine cannot serve the model exactly; the message has the reason."""


@torch.inference_mode()
def find_packing(model: Any) -> None:
    """Set whether a model's sequences share forward passes: if each then has the result of a plain forward pass alone.

    Others run one at a time through transformers' own cache.

    Args:
        model: The `Model` of `model.py`.

    Raises:
        UnsupportedModelError: That gives wrong results, too.
    """
    if model.hf._is_stateful:
        reason = "its layers keep a recurrent or compressed state, which cannot be paged or cut back"
        raise UnsupportedModelError(f"{type(model.hf).__name__} cannot be served exactly: {reason}")
    tried = []
    has_other_window = any(getattr(model.config, field, None) for field in OTHER_WINDOWS)
    for packs in (False,) if has_other_window else (True, False):
        model.packs = packs
        with _windows_of(PROBE_WINDOW, model.hf):
            if (failed := _failure(model)) is None:
                return
        tried.append(f"{'together' if model.packs else 'one at a time'}: {failed}")
    raise UnsupportedModelError(f"{type(model.hf).__name__} cannot be served exactly: {'; '.join(tried)}")


def _failure(model: Any) -> str | None:
    """Why prompts cannot run as in the engine; None if they can."""
    prompts = [[(7 * i + 3 * n) % model.vocabulary for i in range(n)] for n in PROBE_LENGTHS]
    alone = [_alone(model, prompt) for prompt in prompts]
    try:
        together = _together(model, prompts) if model.packs else [_in_chunks(model, prompt) for prompt in prompts]
    except (TypeError, ValueError, RuntimeError, AttributeError, LookupError, AssertionError) as error:
        if is_out_of_memory(error) or is_broken(error):
            raise
        return f"{type(error).__name__}: {error}"  # architectures reject unsupported arguments with various errors
    worst = max(relative_error(a, b) for a, b in zip(together, alone, strict=True))
    if worst <= TOLERANCE.get(model.dtype, 1e-1):
        return None
    return f"logits differ from a lone forward's by {worst:.1%} of their norm"


def _alone(model: Any, prompt: list[int]) -> torch.Tensor:
    """[vocabulary] logits of the prompt's last token in a plain forward pass."""
    ids = torch.tensor([prompt], device=model.device)
    return model.hf(input_ids=ids, use_cache=False).logits[0, -1]  # type: ignore[no-any-return]


def _together(model: Any, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
    """[prompts, vocabulary] the same of all, after a forward pass of chunks and one of single tokens and a chunk."""
    cache, held = PagedCache(len(prompts)), [SequenceKv([number]) for number in range(len(prompts))]
    assert max(map(len, prompts)) <= PAGE
    cuts = [*(len(prompt) - 1 for prompt in prompts[:-1]), len(prompts[-1]) - 4]
    last_logits(model, cache, [(kv, 0, prompt[:cut]) for kv, cut, prompt in zip(held, cuts, prompts, strict=True)])
    rest = [(kv, cut, prompt[cut:]) for kv, cut, prompt in zip(held, cuts, prompts, strict=True)]
    return last_logits(model, cache, rest)


def _in_chunks(model: Any, prompt: Sequence[int]) -> torch.Tensor:
    """[vocabulary] the same of one prompt in three chunks, the last of which is a single token."""
    kv, cuts = SequenceKv(), (0, 2, len(prompt) - 1, len(prompt))
    for start, stop in pairwise(cuts):
        logits = last_logits(model, PagedCache(), [(kv, start, prompt[start:stop])])
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
def _windows_of(length: int, model: nn.Module) -> Iterator[None]:
    """Set a model's windows to `length` tokens in this context: a few tokens then show whether it has them.

    Some configs state a window that their model does not have. Modules may have copied their config's value.
    """
    owners: dict[int, Any] = {
        id(owner): owner for module in model.modules() for owner in (module, getattr(module, "config", None))
    }
    stated = {key: getattr(owner, "sliding_window", None) for key, owner in owners.items()}
    stated = {key: window for key, window in stated.items() if isinstance(window, int) and window}
    try:
        for key in stated:
            owners[key].sliding_window = length
        yield
    finally:
        for key, window in stated.items():
            owners[key].sliding_window = window
