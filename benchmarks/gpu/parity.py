"""The engine's tokens, logprobs and recorded rows beside transformers', both beside float32."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.gpu.case import Case, Found, Plan
from deployments.engine import sequence
from deployments.engine.request import Request
from deployments.model.batch import PAGE

LENGTHS = (5, 17, 64, 130, 301)  # of prompts
NEW, TOP = 32, 5
CHUNK = 48  # prompt tokens of a forward pass
# Differences that count as none: the engine's shapes of products are others than transformers', so that libraries add
# up in another order. Beyond these, the engine may be twice as far from float32 as transformers is.
LOGPROB, ROWS = 1e-3, 1e-4


def parity(plan: Plan) -> Found:
    """How far both are from float32, in the model's dtype and in float32."""
    dtypes = [torch.float32] if plan.tiny else [torch.bfloat16]
    if plan.size == "qwen3-0.6b":
        dtypes.append(torch.float32)
    for dtype in dtypes:
        yield str(dtype).removeprefix("torch."), _of(Case(plan, dtype))


def _of(case: Case) -> dict[str, Any]:
    plain = [_request(case, number, length) for number, length in enumerate(LENGTHS)]
    steered = [_request(case, 10 + number, length, steered=True) for number, length in enumerate(LENGTHS[:3])]
    requests = [*plain, *steered]
    longest = -(-(max(LENGTHS) + NEW) // PAGE)
    with patch.object(sequence, "RESERVED_TOKENS", 1):  # so that sequences outgrow the memory
        position = case.engine(1)._memory.position_bytes
        kv_bytes = (longest + 12) * PAGE * position
        engine = case.engine(len(requests), prefill_tokens=CHUNK, kv_bytes=kv_bytes)
        done = engine.generate(requests)
    exact = case.hf if case.hf.dtype == torch.float32 else copy.deepcopy(case.hf).float()
    worst = {"engine": [0.0, 0.0], "transformers": [0.0, 0.0]}
    tie, same = 0.0, 0
    for request, finished in zip(requests, done, strict=True):
        assert finished.rest is not None
        assert finished.captured is not None, finished.error
        ids, first = [*request.prompt, *finished.tokens], len(request.prompt) - 1
        vector = request.edits[0].vector if request.edits else None
        logits, states = _run(exact, ids, vector)
        theirs, their_states = _run(case.hf, ids, vector)
        for at, (token, said) in enumerate(zip(finished.tokens, finished.rest.logprobs, strict=True)):
            known, near = logits[first + at], theirs[first + at]
            tokens = [token, *(id for id, _ in said.top)]
            values = torch.tensor([said.logprob, *(value for _, value in said.top)], device=known.device)
            worst["engine"][0] = max(worst["engine"][0], float((values - known[tokens]).abs().max()))
            worst["transformers"][0] = max(worst["transformers"][0], float((near - known)[tokens].abs().max()))
            tie = max(tie, float(known.max() - known[token]))
            same += int(known.argmax()) == token
        for layer, state in enumerate(states):
            mine: Any = finished.captured.values[f"layers.{layer}.output"]
            assert len(mine) == len(ids)
            worst["engine"][1] = max(worst["engine"][1], _relative(mine.to(state.device), state))
            worst["transformers"][1] = max(worst["transformers"][1], _relative(their_states[layer], state))
    bounds = [max(2 * worst["transformers"][0], LOGPROB), max(2 * worst["transformers"][1], ROWS)]
    fits = all(value <= bound for value, bound in zip(worst["engine"], bounds, strict=True))
    return {
        "worst logprob": {name: values[0] for name, values in worst.items()},
        "worst row, relative": {name: values[1] for name, values in worst.items()},
        "widest tie": tie,
        "greedy in float32": [same, len(requests) * NEW],
        "preempted": engine.statistics.preempted,
        "ok": fits and tie <= 2 * bounds[0] and engine.statistics.preempted > 0,
    }


def _request(case: Case, seed: int, length: int, steered: bool = False) -> Request:
    edits = (case.steering(seed),) if steered else ()
    (request,) = case.requests(1, (length, length), NEW, ["layers.*.output"], logprobs=TOP, edits=edits)
    numbers = torch.randint(case.model.vocabulary, (length,), generator=torch.Generator().manual_seed(seed))
    return replace(request, id=str(seed), prompt=numbers.tolist())


@torch.inference_mode()
def _run(hf: Any, ids: Sequence[int], vector: torch.Tensor | None) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logprobs [tokens, vocabulary] and each layer's output [tokens, hidden] of a plain forward pass, in float32."""
    states: list[torch.Tensor] = []
    layers = hf.get_decoder().layers

    def steer(_: Any, __: Any, output: Any) -> Any:
        return (output.float() + vector).to(output.dtype)

    def keep(_: Any, __: Any, output: torch.Tensor) -> None:
        states.append(output[0].float())

    with ExitStack() as hooks:
        if vector is not None:
            hooks.callback(layers[len(layers) // 2].register_forward_hook(steer).remove)
        for layer in layers:
            hooks.callback(layer.register_forward_hook(keep).remove)
        logits = hf(torch.tensor([ids], device=hf.device), use_cache=False).logits[0]
    return logits.float().log_softmax(-1), states


def _relative(rows: torch.Tensor, known: torch.Tensor) -> float:
    return float(((rows.float() - known).norm(dim=-1) / known.norm(dim=-1)).max())
