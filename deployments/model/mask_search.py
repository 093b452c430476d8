"""Finds, at load, the masks with which a model's requests may share a batch; a model without such is refused."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from deployments.model.kv_cache import SlotCache
from deployments.model.masks import Masks, candidates, unknown_window, windows_of

TOLERANCE = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}  # of the logits' norm
PROBE_LENGTHS = (9, 4, 6)  # of the prompts
PROBE_WINDOW = 3  # tokens of an attention window meanwhile, fewer than the prompts have


class UnsupportedModelError(ValueError):
    """A model this engine cannot batch exactly; the message says why."""


class Model(Protocol):
    """What the search needs of a model. `model.py` has more."""

    hf: Any
    config: Any
    masks: Masks

    @property
    def device(self) -> torch.device: ...  # noqa: D102

    @property
    def dtype(self) -> torch.dtype: ...  # noqa: D102

    @property
    def vocabulary(self) -> int: ...  # noqa: D102

    def new_cache(self) -> SlotCache: ...  # noqa: D102

    def prefill(  # noqa: D102
        self, ids: torch.Tensor, lengths: torch.Tensor, cache: SlotCache, *, start: int = 0
    ) -> torch.Tensor: ...

    def decode(  # noqa: D102
        self, ids: torch.Tensor, positions: torch.Tensor, longest: int, cache: SlotCache
    ) -> torch.Tensor: ...


@torch.inference_mode()
def find_masks(model: Model) -> None:
    """Set the model's masks to those with which unequal rows in one batch give what each gives alone.

    Raises:
        UnsupportedModelError: None do.
    """
    tried = []
    found = [] if unknown_window(model.config) else _candidates(model)
    with windows_of(PROBE_WINDOW, model.hf):
        for masks, narrow in zip(found, _candidates(model), strict=False):
            model.masks = narrow
            if (failed := _failure(model)) is None:
                model.masks = masks
                return
            tried.append(f"{masks.form}: {failed}")
    raise UnsupportedModelError(f"{type(model.hf).__name__} cannot be batched exactly: {_reason(model, tried)}")


def _candidates(model: Model) -> list[Masks]:
    return candidates(model.config, model.config._attn_implementation, model.dtype)


def _failure(model: Model) -> str | None:
    """What is wrong with the model's masks; None where there is nothing."""
    prompts = [[(7 * i + 3 * n) % model.vocabulary for i in range(n)] for n in PROBE_LENGTHS]
    alone = [_alone(model, prompt) for prompt in (*prompts, prompts[0])]
    try:
        together = [*_together(model, prompts), _in_pieces(model, prompts[0], 4)]
    except (TypeError, ValueError, RuntimeError, AttributeError, KeyError, IndexError) as error:
        return f"{type(error).__name__}: {error}"  # architectures refuse a form they do not take in ways of their own
    worst = max(relative_error(a, b) for a, b in zip(together, alone, strict=True))
    if worst <= TOLERANCE.get(model.dtype, 1e-1):
        return None
    return f"logits differ from a lone forward's by {worst:.1%} of their norm"


def _reason(model: Model, tried: list[str]) -> str:
    """Why no masks will do, from what became of those that were tried."""
    if model.hf._is_stateful:
        return "its layers keep a recurrent or compressed state, which no mask keeps apart for requests in one batch"
    if field := unknown_window(model.config):
        return f"its attention has a window of its own kind, `{field}`, for which there are no masks"
    if tried:
        return "; ".join(tried)
    return f"there are no masks for layers of the kinds {', '.join(dict.fromkeys(model.config.layer_types))}"


def _alone(model: Model, prompt: list[int]) -> torch.Tensor:
    """[vocabulary] logits of the prompt's last token in a plain forward."""
    ids = torch.tensor([prompt], device=model.device)
    return model.hf(input_ids=ids, use_cache=False).logits[0, -1]  # type: ignore[no-any-return]


def _together(model: Model, prompts: list[list[int]]) -> torch.Tensor:
    """[prompts, vocabulary] the same after one padded prefill of all but their last tokens, and one decode."""
    device, count = model.device, len(prompts)
    lengths = torch.tensor([len(prompt) - 1 for prompt in prompts], device=device)
    longest = int(lengths.max())
    cache = model.new_cache()
    cache.resize(count, longest + 1)
    cache.prefill(0)
    padded = [prompt[:-1] + [0] * (longest + 1 - len(prompt)) for prompt in prompts]
    model.prefill(torch.tensor(padded, device=device), lengths, cache)
    cache.decode(torch.arange(count, device=device), lengths, longest + 1)
    return model.decode(torch.tensor([prompt[-1] for prompt in prompts], device=device), lengths, longest + 1, cache)


def _in_pieces(model: Model, prompt: list[int], first: int) -> torch.Tensor:
    """[vocabulary] the same after a prefill of `first` tokens and one of the rest."""
    cache = model.new_cache()
    cache.resize(1, len(prompt))
    for start, piece in ((0, prompt[:first]), (first, prompt[first:])):
        cache.prefill(0, start)
        ids = torch.tensor([piece], device=model.device)
        logits = model.prefill(ids, torch.tensor([len(piece)], device=model.device), cache, start=start)
    return logits[0]


def relative_error(a: torch.Tensor, b: torch.Tensor) -> float:
    """How far a is from b, as a part of b's norm."""
    return float((a.float() - b.float()).norm() / b.float().norm().clamp_min(1e-9))
