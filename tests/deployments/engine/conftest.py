"""What a request gets alone, the measure of what it gets in company; and hands to run an engine with."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from deployments.activations.points import Point
from deployments.activations.spec import Capture
from deployments.engine.engine import Engine
from deployments.engine.model import Model
from deployments.engine.request import Event, Finished, Request

TIE = 1e-4


def _prompt(length: int, seed: int = 0) -> list[int]:
    numbers = random.Random(1000 * length + seed)
    return [numbers.randrange(3, 256) for _ in range(length)]


def _alone(model: Model, prompt: Sequence[int], new: int) -> list[int]:
    """Greedy tokens of transformers' generate."""
    if not new:
        return []
    ids = torch.tensor([list(prompt)])
    out = model.hf.generate(
        ids,
        attention_mask=torch.ones_like(ids),  # else it takes a prompt's pad tokens for padding
        do_sample=False,
        max_new_tokens=new,
        eos_token_id=sorted(model.eos),
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


@torch.inference_mode()
def _same_greedy(model: Model, prompt: Sequence[int], got: Sequence[int], want: Sequence[int]) -> bool:
    """Whether tokens are the same, or part where the model all but tied.

    The order of a sum differs with the batch's shape, so two logits closer than rounding may change places,
    and what follows is another text.
    """
    if list(got) == list(want):
        return True
    first = next((i for i, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), None)
    if first is None:
        return False
    ids = torch.tensor([[*prompt, *want[:first]]])
    top = model.hf(input_ids=ids, use_cache=False).logits[0, -1].topk(2).values
    return bool(top[0] - top[1] < TIE)


@torch.inference_mode()
def _lone_values(model: Model, tokens: Sequence[int], points: Sequence[Point]) -> dict[str, torch.Tensor]:
    """What hooks that clone see at each point in one plain forward, [tokens, ...]."""
    seen: dict[tuple[str, str], torch.Tensor] = {}

    def keep(module: str, side: str, value: Any) -> None:
        value = value[0] if isinstance(value, tuple) else value
        seen[module, side] = value.detach().clone()

    def before(module: str) -> Callable[..., None]:
        return lambda _, args, kwargs: keep(module, "input", next(iter((*args, *kwargs.values()))))

    def after(module: str) -> Callable[..., None]:
        return lambda _, args, output: keep(module, "output", output)

    with ExitStack() as hooks:
        for path in {point.place.module for point in points}:
            module = model.hf.get_submodule(path)
            hooks.callback(module.register_forward_pre_hook(before(path), with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(after(path)).remove)
        model.hf(input_ids=torch.tensor([list(tokens)]), use_cache=False)
    return {
        point.name: seen[point.place.module, point.place.side].reshape(len(tokens), *point.shape) for point in points
    }


def _assert_rows_close(got: torch.Tensor, want: torch.Tensor, name: str = "", tolerance: float = 1e-4) -> None:
    """Each row within `tolerance` of its norm."""
    assert got.shape == want.shape, f"{name}: {tuple(got.shape)}, not {tuple(want.shape)}"
    got, want = got.float().flatten(1), want.float().flatten(1)
    far = (got - want).norm(dim=1) > tolerance * want.norm(dim=1) + 1e-6
    assert not far.any(), f"{name}: rows {far.nonzero().flatten().tolist()} differ"


def _capturing(model: Model, id: str, prompt: Sequence[int], max_tokens: int, **capture: Any) -> Request:
    wanted = Capture.model_validate(capture)
    return Request(id, prompt, max_tokens, capture=wanted, points=model.points.resolve(wanted))


def _drain(engine: Engine) -> list[Event]:
    """Step until nothing runs or waits."""
    events = engine.step()
    while engine.statistics.running or engine.statistics.waiting:
        events += engine.step()
    return events


def _endings(events: Sequence[Event]) -> dict[str, Finished]:
    """Last events by id, of which each request has one."""
    found = [event for event in events if isinstance(event, Finished)]
    by_id = {event.id: event for event in found}
    assert len(by_id) == len(found), "a request ended twice"
    return by_id


@pytest.fixture(scope="session")
def prompt() -> Callable[..., list[int]]:
    """Makes a random prompt of a length, the same one for the same seed."""
    return _prompt


@pytest.fixture(scope="session")
def alone() -> Callable[..., list[int]]:
    return _alone


@pytest.fixture(scope="session")
def same_greedy() -> Callable[..., bool]:
    return _same_greedy


@pytest.fixture(scope="session")
def lone_values() -> Callable[..., dict[str, torch.Tensor]]:
    return _lone_values


@pytest.fixture(scope="session")
def assert_rows_close() -> Callable[..., None]:
    return _assert_rows_close


@pytest.fixture(scope="session")
def capturing() -> Callable[..., Request]:
    """Makes a request that captures: `capturing(model, id, prompt, max_tokens, points=[...], tokens="last")`."""
    return _capturing


@pytest.fixture(scope="session")
def drain() -> Callable[[Engine], list[Event]]:
    return _drain


@pytest.fixture(scope="session")
def endings() -> Callable[[Sequence[Event]], dict[str, Finished]]:
    return _endings


@pytest.fixture(scope="session")
def ending_prompt(tiny: Callable[..., Model]) -> list[int]:
    """A prompt that "qwen3" answers with an end token within 20 tokens."""
    prompts = [_prompt(4, seed) for seed in range(256)]
    done = Engine(tiny("qwen3")).generate([Request(str(i), prompt, 20) for i, prompt in enumerate(prompts)])
    return next(prompt for prompt, finished in zip(prompts, done, strict=True) if finished.reason == "stop")
