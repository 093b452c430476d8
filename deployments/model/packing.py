"""Tests whether sequences of a loaded model may share a forward pass; rejects a model with wrong results either way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from deployments.model.device_memory import is_broken, is_out_of_memory
from deployments.model.kv_cache import PAGE, PagedCache, SequenceKv, TokenSpan

TOLERANCE = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}  # relative to the logits' norm
PROBE_LENGTHS = (9, 4, 6)  # of the prompts
PROBE_WINDOW = 3  # tokens of an attention window during the test, fewer than in the prompts
# Other fields with windows in some architectures: a probe shorter than the window would not reveal it.
OTHER_WINDOWS = ("window_size", "attention_chunk_size", "keep_window_size", "sliding_window_size")


class UnsupportedModelError(ValueError):
    """This engine cannot serve the model exactly; the message has the reason."""


class Model(Protocol):
    """The part of a model that the test needs; see `model.py`."""

    hf: Any
    config: Any
    packs: bool
    context: int

    @property
    def device(self) -> torch.device:
        """The device of token ids."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""

    @property
    def vocabulary(self) -> int:
        """The number of token ids."""

    def forward(self, ids: list[int], spans: list[TokenSpan], wanted: list[int], cache: PagedCache) -> torch.Tensor:
        """Run packed tokens; returns logits `[wanted, vocabulary]` of the wanted rows."""


@torch.inference_mode()
def find_packing(model: Model) -> None:
    """Set whether a model's sequences share forward passes: if each then has the result of a plain forward pass alone.

    Others run one at a time through transformers' own cache.

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
        with windows_of(PROBE_WINDOW, model.hf):
            if (failed := _failure(model)) is None:
                return
        tried.append(f"{'together' if model.packs else 'one at a time'}: {failed}")
    raise UnsupportedModelError(f"{type(model.hf).__name__} cannot be served exactly: {'; '.join(tried)}")


def _failure(model: Model) -> str | None:
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


def _alone(model: Model, prompt: list[int]) -> torch.Tensor:
    """[vocabulary] logits of the prompt's last token in a plain forward pass."""
    ids = torch.tensor([prompt], device=model.device)
    return model.hf(input_ids=ids, use_cache=False).logits[0, -1]  # type: ignore[no-any-return]


def _together(model: Model, prompts: list[list[int]]) -> list[torch.Tensor]:
    """[vocabulary] the same of each, after one forward pass of some chunks and one of the rest and single tokens."""
    cache = PagedCache(len(prompts))
    held = [SequenceKv([number]) for number in range(len(prompts))]
    assert max(map(len, prompts)) <= PAGE
    cuts = [len(prompts[0]) - 4, *(len(prompt) - 1 for prompt in prompts[1:])]
    first = [TokenSpan(kv, 0, cut) for kv, cut in zip(held, cuts, strict=True)]
    model.forward([id for prompt, cut in zip(prompts, cuts, strict=True) for id in prompt[:cut]], first, [0], cache)
    rest = [TokenSpan(kv, cut, len(prompt) - cut) for kv, cut, prompt in zip(held, cuts, prompts, strict=True)]
    ends = torch.tensor([span.count for span in rest]).cumsum(0) - 1
    ids = [id for prompt, cut in zip(prompts, cuts, strict=True) for id in prompt[cut:]]
    return list(model.forward(ids, rest, ends.tolist(), cache))


def _in_chunks(model: Model, prompt: list[int]) -> torch.Tensor:
    """[vocabulary] the same of one prompt in three chunks, the last of which is a single token."""
    kv, cuts = SequenceKv(), (0, 2, len(prompt) - 1, len(prompt))
    for start, stop in zip(cuts, cuts[1:], strict=False):
        logits = model.forward(
            prompt[start:stop], [TokenSpan(kv, start, stop - start)], [stop - start - 1], PagedCache()
        )
    return logits[0]


def relative_error(a: torch.Tensor, b: torch.Tensor) -> float:
    """The distance of a from b, relative to b's norm."""
    return float((a.float() - b.float()).norm() / b.float().norm().clamp_min(1e-9))


@contextmanager
def windows_of(length: int, model: nn.Module) -> Iterator[None]:
    """Set a model's windows to `length` tokens in this context: a few tokens then show whether it has them.

    Some configs state a window that their model does not have. Modules may have copied their config's value.
    """
    owners = [owner for module in model.modules() for owner in (module, getattr(module, "config", None)) if owner]
    holders = {id(owner): owner for owner in owners}
    stated = [
        (holder, window)
        for holder in holders.values()
        if isinstance(window := getattr(holder, "sliding_window", None), int) and window
    ]
    try:
        for holder, _ in stated:
            holder.sliding_window = length
        yield
    finally:
        for holder, window in stated:
            holder.sliding_window = window
