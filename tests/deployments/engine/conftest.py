"""What a request gets alone, to compare with what it gets in a batch; and helpers that run an engine."""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from deployments.engine.capture.buffer import joined
from deployments.engine.engine import Engine
from deployments.engine.request import (
    Captured,
    Delta,
    Event,
    Finished,
    Likeliest,
    Logprob,
    PromptLogprobs,
    Request,
    Rows,
)
from deployments.model.model import Model
from deployments.model.references import by_hooks
from deployments.places.hook_site import Point
from deployments.points.capture import Capture
from deployments.points.patterns import Patterns
from deployments.points.token_choices import Last

sys.path.append(str(Path(__file__).parent))  # importlib mode adds no folder; `by_hand` stands beside this file
TIE = 1e-4


def _prompt(length: int, seed: int = 0) -> list[int]:
    numbers = random.Random(1000 * length + seed)
    return [numbers.randrange(3, 256) for _ in range(length)]


def _generate(model: Model, prompt: Sequence[int], new: int, **settings: Any) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens of transformers' generate, and the logits [tokens, vocabulary] they came of."""
    ids = torch.tensor([list(prompt)], device=model.device)
    out = model.hf.generate(
        ids,
        attention_mask=torch.ones_like(ids),  # else it takes a prompt's pad tokens for padding
        do_sample=False,
        max_new_tokens=new,
        eos_token_id=sorted(model.eos),
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
        **settings,
    )
    return out.sequences[0, len(prompt) :].tolist(), torch.cat(out.logits).cpu()


def _alone(model: Model, prompt: Sequence[int], new: int, **settings: Any) -> list[int]:
    """Greedy tokens of transformers' generate."""
    return _generate(model, prompt, new, **settings)[0] if new else []


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
    ids = torch.tensor([[*prompt, *want[:first]]], device=model.device)
    top = model.hf(input_ids=ids, use_cache=False).logits[0, -1].topk(2).values
    return bool(top[0] - top[1] < TIE)


def _lone_values(model: Any, tokens: Sequence[int], points: Sequence[Point]) -> dict[str, Any]:
    """What hooks see at each point in one plain forward, [tokens, ...]; of patterns, row by row."""
    values = by_hooks(model.hf, tokens, points)
    return {
        point.name: _patterns(values[point.name].transpose(0, 1)) if point.place.grows else values[point.name]
        for point in points
    }


def _patterns(weights: torch.Tensor) -> Patterns:
    """[heads, tokens, tokens] without what is masked, all of which is 0."""
    heads, tokens, _ = weights.shape
    assert not weights.triu(1).any()
    return Patterns(torch.cat([weights[:, k, : k + 1].flatten() for k in range(tokens)]), heads, range(tokens))


def _assert_rows_close(got: Any, want: Any, name: str = "", tolerance: float = 1e-4) -> None:
    """Each row within `tolerance` of its norm."""
    if not isinstance(got, torch.Tensor):  # patterns
        assert [row.shape for row in got] == [row.shape for row in want], name
        got, want = ([row.flatten() for row in rows] or [torch.empty(0)] for rows in (got, want))
        got, want = pad_sequence(got, batch_first=True), pad_sequence(want, batch_first=True)
    assert got.shape == want.shape, f"{name}: {tuple(got.shape)}, not {tuple(want.shape)}"
    got, want = got.float().flatten(1), want.float().flatten(1)
    far = ~((got - want).norm(dim=1) <= tolerance * want.norm(dim=1) + 1e-6)
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


class Lone:
    """What requests get of one model alone, remembered; and whether that is what they got in company.

    Attributes:
        prompts: A prompt of each length.
        rare: A token that is in none of them, nor in what generate makes of them.
    """

    def __init__(self, model: Model, prompts: dict[int, list[int]], new: int) -> None:
        self.model = model
        self.prompts = prompts
        self._new = new
        self.generated = functools.cache(self._generated)
        self.values = functools.cache(functools.partial(_lone_values, model))
        self.forced = functools.cache(self._forced)
        met = {token for ids in prompts.values() for token in (*ids, *self.generated(tuple(ids))[0])}
        self.rare = next(token for token in range(255, 0, -1) if token not in met)

    def _generated(self, prompt: tuple[int, ...]) -> tuple[list[int], torch.Tensor]:
        """Greedy tokens of transformers' generate, and the logprobs [tokens, vocabulary] they came of."""
        tokens, logits = _generate(self.model, prompt, self._new)
        return tokens, logits.float().log_softmax(-1)

    @torch.inference_mode()
    def _forced(self, prompt: tuple[int, ...]) -> torch.Tensor:
        """[tokens - 1, vocabulary] logprobs behind each prompt token but the last in one plain forward."""
        ids = torch.tensor([prompt], device=self.model.device)
        return self.model.hf(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1).cpu()

    def check(self, request: Request, events: Sequence[Event], cancelled: bool) -> None:
        """Assert that these are a request's events, where the model fed the rare token gives nothing finite."""
        *before, last = events
        assert isinstance(last, Finished)
        assert not any(isinstance(event, Finished) for event in before)
        deltas = [event for event in before if isinstance(event, Delta)]
        tokens = list(last.tokens)
        assert [token for delta in deltas for token in delta.tokens] == tokens
        said = [one for delta in deltas for one in delta.logprobs]
        assert len(said) == (0 if request.logprobs is None else len(tokens))
        seen = [[layer.top for layer in layers] for delta in deltas for layers in delta.lens]
        assert len(seen) == (len(tokens) if request.lens else 0)
        self._check_prompt(request, before, cancelled)
        self._check_tokens(request, tokens, said)
        self._check_lens(request, tokens, seen)
        self._check_ending(request, last, cancelled)
        parts = [event.captured for event in before if isinstance(event, Rows)]
        if parts or last.captured:
            parts += [last.captured] if last.captured else []
            self._check_rows(request, [*request.prompt, *tokens], parts, whole=last.captured is not None)

    def _check_prompt(self, request: Request, before: list[Event], cancelled: bool) -> None:
        """Its prompt's logprobs came once, before any token, and are a plain forward's."""
        scored = [event for event in before if isinstance(event, PromptLogprobs)]
        if request.prompt_logprobs is None or self.rare in request.prompt:
            assert not scored
        elif scored or not cancelled:
            (one,) = scored
            assert not any(isinstance(event, Delta) for event in before[: before.index(one)])
            rows = self.forced(tuple(request.prompt))
            for token, got, row in zip(request.prompt[1:], one.logprobs, rows, strict=True):
                assert got.logprob == pytest.approx(float(row[token]), abs=TIE)
                values = torch.tensor([value for _, value in got.top])
                torch.testing.assert_close(values, row.topk(request.prompt_logprobs).values, rtol=0, atol=TIE)

    def _check_tokens(self, request: Request, tokens: list[int], said: list[Logprob]) -> None:
        """Up to the rare token they are generate's, and so are their logprobs."""
        if self.rare in request.prompt:
            assert not tokens
            return
        sound = (*tokens, self.rare).index(self.rare)
        want, logprobs = self.generated(tuple(request.prompt))
        assert _same_greedy(self.model, request.prompt, tokens[:sound], want[:sound])
        for token, wanted, one, row in zip(tokens[:sound], want, said, logprobs, strict=False):
            if token != wanted:
                break  # the model all but tied
            assert one.logprob == pytest.approx(float(row[token]), abs=TIE)
            ids, values = [id for id, _ in one.top], torch.tensor([value for _, value in one.top])
            torch.testing.assert_close(values, row.topk(len(ids)).values, rtol=0, atol=TIE)
            torch.testing.assert_close(values, row[ids], rtol=0, atol=TIE)

    def _check_lens(self, request: Request, tokens: list[int], seen: list[tuple[Likeliest, ...]]) -> None:
        """Up to the rare token the last layer's is what generate's logprobs say, and each layer has one."""
        want, logprobs = self.generated(tuple(request.prompt))
        for token, wanted, layers, row in zip(tokens, want, seen, logprobs, strict=False):
            assert request.lens is not None
            assert [len(top) for top in layers] == [request.lens.top_k] * len(request.lens.layers)
            values = torch.tensor([value for _, value in layers[-1]])
            torch.testing.assert_close(values, row.topk(len(values)).values, rtol=0, atol=TIE)
            if token != wanted:
                break  # the rare one, or the model all but tied

    def _check_ending(self, request: Request, last: Finished, cancelled: bool) -> None:
        tokens, capture = last.tokens, request.capture
        if cancelled and last.reason == "cancelled":
            assert last.captured is None
        elif self.rare in request.prompt or (self.rare in tokens and len(tokens) < request.max_tokens):
            assert (last.reason, last.captured) == ("error", None)
            assert "not finite" in (last.error or "")
        else:
            ended = bool(tokens) and tokens[-1] in self.model.eos
            assert (last.reason, last.error) == ("stop" if ended else "length", None)
            assert ended or len(tokens) == request.max_tokens
            assert (last.captured is None) == (capture is None)

    def _check_rows(self, request: Request, sequence: list[int], parts: list[Captured], whole: bool) -> None:
        """Each row came once and in order, and up to the rare token is what a lone forward shows."""
        asked, rows = _rows_asked(request, len(sequence)), joined(parts)
        assert rows.positions == (asked if whole else range(asked.start, rows.positions.stop))
        assert all(a.positions.stop == b.positions.start for a, b in pairwise(parts))
        assert list(rows.token_ids) == [sequence[i] for i in rows.positions]
        assert rows.values.keys() == {point.name for point in request.points}
        sound = (*sequence, self.rare).index(self.rare)
        if sound < len(sequence) and (self.model.has_states or not self.model.packs):
            return  # transformers' own code spoils the rows of a piece before what is not finite
        want = self.values(tuple(sequence[:sound]), request.points) if sound else {}
        start, stop = rows.positions.start, rows.positions.stop
        for point, values in want.items():
            assert len(rows.values[point]) == len(rows.positions)
            _assert_rows_close(rows.values[point][: max(0, sound - start)], values[start:stop], point)


def _rows_asked(request: Request, total: int) -> range:
    """Positions that a capture is to have of `total` tokens."""
    assert request.capture is not None
    prompt, tokens = len(request.prompt), request.capture.tokens
    if isinstance(tokens, Last):
        return range(max(0, total - tokens.last), total)
    return {
        "all": range(total),
        "prompt": range(prompt),
        "generated": range(prompt, total),
        "last": range(total - 1, total),
        "prompt_last": range(prompt - 1, prompt),
        "generated_last": range(max(prompt, total - 1), total),
    }[tokens]


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
def lone_values() -> Callable[..., dict[str, Any]]:
    return _lone_values


@pytest.fixture(scope="session")
def make_lone() -> Callable[..., Lone]:
    """Makes the measure of a model: `make_lone(model, {length: prompt}, most new tokens)`."""
    return Lone


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
