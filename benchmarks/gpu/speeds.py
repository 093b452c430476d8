"""Tokens per second of the engine, of `generate` and of `generate_batch`, and what each capability costs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partialmethod
from statistics import median
from typing import Any
from unittest.mock import patch

from benchmarks.gpu.case import SERVED_CAPTURE_BYTES, Case, Found, Plan
from benchmarks.gpu.machine import bandwidth
from benchmarks.ways import Work, generate_batch
from deployments.engine.engine import Engine
from deployments.engine.output_processor import OutputProcessor
from deployments.engine.request import Sampling
from deployments.model.attention import flash, triton_decode
from deployments.model.fast_layers import Switch

SAMPLED: dict[str, Any] = {"sampling": Sampling(temperature=0.8, top_p=0.9, seed=0), "logprobs": 5}
TURNS = 3  # of each variant; their median counts
STEERED = 32  # requests with a vector of their own
VECTORS = f"{STEERED} vectors"
ALREADY_WARM = 50_000  # tokens of all prompts, beyond which smaller ones have warmed up what there is to
FEW = 2  # tokens of the shorter `generate`; the difference to a longer one is decoding alone


def decode(plan: Plan) -> Found:
    """Decoding alone, beside the time in which the device reads the weights and the keys and values once."""
    case, copied = Case(plan), bandwidth(plan.device)
    yield "copy, bytes/s", copied
    yield "weight bytes", case.weight_bytes
    case.decode(case.requests(plan.rows[-1], (8, 8), 8))  # for nothing
    for rows in plan.rows:
        for context, lengths in plan.contexts.items():
            new = case.new_tokens(rows, lengths)
            requests = case.requests(rows, lengths, new)
            prompts = [request.prompt for request in requests]
            held = sum(map(len, prompts)) + rows * new // 2
            floor = (case.weight_bytes + held * case.kv_bytes) / copied
            rate = case.decode(requests)
            case.release()
            if held < ALREADY_WARM:
                case.generate(prompts, FEW)
            short = case.generate(prompts, FEW)
            step = (case.generate(prompts, FEW + plan.steps) - short) / plan.steps
            yield (
                f"{rows} x {context}",
                {
                    "engine, tokens/s": rate,
                    "generate, tokens/s": rows / step,
                    "engine, ms/step": 1e3 * rows / rate,
                    "floor, ms/step": 1e3 * floor,
                    "engine / generate": rate * step / rows,
                    "engine / floor": rate * floor / rows,
                },
            )


def prefill(plan: Plan) -> Found:
    """Prompt tokens per second: until each request has its first token."""
    case = Case(plan)
    for count, length in plan.prompts:
        requests = case.requests(count, (length, length), 1)
        prompts = [request.prompt for request in requests]
        ours = [case.total(requests) for _ in range(2)]
        case.release()
        theirs = [case.generate(prompts, 1) for _ in range(2)]
        yield (
            f"{count} x {length}",
            {
                "engine, tokens/s": count * length / min(ours),
                "generate, tokens/s": count * length / min(theirs),
                "engine, first turn": count * length / ours[0],
                "engine / generate": min(theirs) / min(ours),
            },
        )


def ways(plan: Plan) -> Found:
    """Whole requests whose rows are recorded, vectors added, texts streamed and tokens drawn."""
    case = Case(plan)
    layer = f"layers.{case.model.points.layer_count // 2}.output"
    asked: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "plain": ({}, {}),
        "one layer": ({"points": [layer]}, {}),
        "all layers": ({"points": ["layers.*.output"]}, {}),
        "all layers, served": ({"points": ["layers.*.output"]}, {"capture_bytes": SERVED_CAPTURE_BYTES}),
        "streamed": ({"streamed": True}, {}),
        "top_p and logprobs": (SAMPLED, {}),
        VECTORS: ({}, {}),
    }
    for rows in plan.rows[1:]:
        lengths, new, plain = next(iter(plan.contexts.values())), 3 * plan.steps, 0.0
        case.total(case.requests(rows, lengths, 4))  # for nothing
        for name, (fields, options) in asked.items():
            requests = case.requests(rows, lengths, new, **fields)
            if name == VECTORS:
                requests = [
                    replace(one, edits=(case.steering(seed),) if seed < STEERED else ())
                    for seed, one in enumerate(requests)
                ]
            rate = rows * new / case.total(requests, **options)
            plain = plain or rate
            yield f"{rows} rows, {name}", {"tokens/s": rate, "of plain": rate / plain}


def batching(plan: Plan) -> Found:
    """Whole requests, prompts included: the engine beside transformers' continuous batching."""
    case, new = Case(plan), 3 * plan.steps
    for rows in plan.rows:
        for context, lengths in plan.contexts.items():
            requests = case.requests(rows, lengths, new)
            work = Work([list(request.prompt) for request in requests], new, plan.device)
            batched = generate_batch(case.hf, work, "generate_batch", persistent=False)
            ours = min(case.total(requests) for _ in range(2))
            case.release()
            theirs = min(batched.run().seconds for _ in range(2))
            yield (
                f"{rows} x {context}",
                {
                    "engine, tokens/s": rows * new / ours,
                    "generate_batch, tokens/s": rows * new / theirs,
                    "engine / generate_batch": theirs / ours,
                },
            )


# ---- variants: what the engine does now, undone


VARIANTS: dict[str, Callable[[], Any]] = {
    "no-graphs": lambda: patch.object(Engine, "__init__", partialmethod(Engine.__init__, cuda_graphs=False)),
    "not-ahead": lambda: patch.object(OutputProcessor, "may_run_ahead", lambda _: False),
    "decode-by-torch": lambda: patch.object(triton_decode, "takes", lambda *_: False),
    "one-prompt-a-call": lambda: patch.object(flash, "takes", lambda *_: False),
    "own-norms": lambda: patch.object(Switch, "turned_on", lambda _: nullcontext()),
}


def variants(plan: Plan) -> Found:
    """Decoding and prompts with one improvement undone, between two turns of the engine as it is."""
    case = Case(plan)
    rows, lengths = plan.rows[1], plan.contexts["mixed"]
    count, length = plan.prompts[1]
    for name in ("as it is", *VARIANTS, "as it is, again"):
        with VARIANTS[name]() if name in VARIANTS else patch.dict({}):
            new, prompts = case.new_tokens(rows, lengths), case.requests(count, (length, length), 1)
            case.total(prompts)  # for nothing: libraries compile and choose at first
            decoded = [case.decode(case.requests(rows, lengths, new)) for _ in range(TURNS)]
            ran = [count * length / case.total(prompts) for _ in range(TURNS)]
        yield (
            name,
            {
                f"decode {rows} x mixed, tokens/s": median(decoded),
                f"prefill {count} x {length}, tokens/s": median(ran),
            },
        )
