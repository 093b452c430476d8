"""The engine's peers, each with its own copy of the weights and its best settings."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import nnsight
import torch
from transformers import ContinuousBatchingConfig
from transformers.utils import logging as transformers_logging

from benchmarks.common.measuring import Tokens, Way, timed
from benchmarks.common.work import Work

transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)


@contextlib.contextmanager
def cloned(hf: Any, capture: bool) -> Iterator[None]:
    """With `capture`, clone the output of every layer by forward hooks, as one reads activations without nnsight."""
    kept: list[torch.Tensor] = []

    def keep(_: Any, __: Any, output: Any) -> None:
        hidden = output if isinstance(output, torch.Tensor) else output[0]
        kept.append(hidden.to("cpu", copy=True))

    hooks = [layer.register_forward_hook(keep) for layer in hf.get_decoder().layers if capture]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    assert bool(kept) == capture


def static_generate(hf: Any, work: Work, capture: bool = False) -> Way:
    """`generate` on one perfect batch: all prompts at once, padded on the left, nobody joining or leaving."""
    ids, mask = work.padded()

    def run() -> Tokens:
        with torch.inference_mode(), cloned(hf, capture):
            out = hf.generate(ids, attention_mask=mask, generation_config=work.settings())
        return [row[ids.shape[1] :] for row in out.tolist()]

    name = "generate, one static batch" + (", hooks clone all layer outputs" if capture else "")
    return Way(name, lambda: timed(run, work.device))


# On a CPU the best of those that `sweep` tries: by default its cache takes 60% of the free memory. What it remembers of
# earlier prompts would be no work done, so it shares nothing.
BATCHING: Mapping[str, Mapping[str, Any]] = {
    "cpu": {"num_blocks": 64, "max_batch_tokens": 512, "allow_block_sharing": False},
    "cuda": {"allow_block_sharing": False},
}


def generate_batch(
    hf: Any,
    work: Work,
    options: Mapping[str, Any] | None = None,
    *,
    capture: bool = False,
    persistent: bool = True,
    name: str = "generate_batch",
) -> Way:
    """Transformers' continuous batching.

    Args:
        hf: The model; its attention implementation is the one used.
        work: What to generate.
        options: Of `ContinuousBatchingConfig`; the best of those tried unless given.
        capture: Clone all layer outputs.
        persistent: Keep its thread and its cache from one turn to the next.
        name: The way's.
    """
    options = BATCHING[torch.device(work.device).type] if options is None else options
    config = ContinuousBatchingConfig(**options)

    def run() -> Tokens:
        settings = work.settings()
        settings.eos_token_id = -1  # its way of saying that there is none
        with cloned(hf, capture):
            out = hf.generate_batch(
                inputs=work.prompts,
                generation_config=settings,
                continuous_batching_config=config,
                persistent_manager=persistent,
            )
        return [list(answer.generated_tokens) for answer in out.values()]

    note = ", ".join(f"{key}={value}" for key, value in options.items())
    suffix = ", hooks clone all layer outputs" if capture else ""
    return Way(name + suffix, lambda: timed(run, work.device), f"{hf.config._attn_implementation}; {note}")


def nnsight_static(hf: Any, tokenizer: Any, work: Work) -> Way:
    """Nnsight's `generate` on one static batch, all layer outputs in its cache."""
    model = nnsight.TransformersModel(hf, tokenizer=tokenizer)
    ids, mask = work.padded()
    name = "nnsight, one static batch, all layer outputs cached"
    return Way(name, lambda: timed(lambda: _nnsight(model, ids, mask, work), work.device))


def nnsight_each(hf: Any, tokenizer: Any, work: Work, requests: int) -> Way:
    """Nnsight's `generate` for one request after another, all layer outputs in its cache.

    Args:
        hf: The model.
        tokenizer: Its tokenizer.
        work: What to generate.
        requests: Only the first so many, since the rate does not change with their number.
    """
    model = nnsight.TransformersModel(hf, tokenizer=tokenizer)

    def run() -> Tokens:
        found = []
        for prompt in work.prompts[:requests]:
            ids = torch.tensor([prompt], device=work.device)
            found += _nnsight(model, ids, torch.ones_like(ids), work)
        return found

    name = "nnsight, one request at a time, all layer outputs cached"
    return Way(name, lambda: timed(run, work.device), f"the first {requests} requests")


@torch.inference_mode()
def _nnsight(model: Any, ids: torch.Tensor, mask: torch.Tensor, work: Work) -> Tokens:
    layers = len(model._module.get_decoder().layers)
    paths = [f"model.model.layers.{i}" for i in range(layers)]
    with model.generate(ids, attention_mask=mask, generation_config=work.settings()) as tracer:
        cache = tracer.cache(modules=paths)
        out = nnsight.save(tracer.result)
    assert len(cache[paths[-1]].output) == work.new_tokens
    return [row[ids.shape[1] :] for row in out.tolist()]


def sweep(hf: Any, work: Work) -> list[Way]:
    """`generate_batch` at every setting that could matter to it here."""
    tried: dict[str, dict[str, Any]] = {
        "defaults": {},
        "few blocks": {"num_blocks": 64},
        "few blocks, no sharing": {"num_blocks": 64, "allow_block_sharing": False},
        "pages of 32": {"page_size": 32, "num_blocks": 1024, "allow_block_sharing": False},
        "pages of 16": {"page_size": 16, "num_blocks": 2048, "allow_block_sharing": False},
        **{
            f"{tokens} tokens a batch": {"num_blocks": 64, "max_batch_tokens": tokens, "allow_block_sharing": False}
            for tokens in (128, 256, 512, 1024)
        },
        "prefill first": {"num_blocks": 64, "scheduler_type": "prefill_first", "allow_block_sharing": False},
    }
    if torch.device(work.device).type == "cuda":  # it refuses a CPU
        tried["asynchronous"] = {"num_blocks": 64, "use_async_batching": True, "allow_block_sharing": False}
    ways = [generate_batch(hf, work, options, persistent=False, name=name) for name, options in tried.items()]
    best = tried["few blocks, no sharing"]
    ways.append(generate_batch(hf, work, best, persistent=True, name="few blocks, no sharing, manager kept"))
    kept = generate_batch(hf, work, best, persistent=False, name="eager attention")

    def eager() -> Any:
        before = hf.config._attn_implementation
        hf.set_attn_implementation("eager")
        try:
            return kept.run()
        finally:
            hf.set_attn_implementation(before)

    return [*ways, Way("eager attention", eager)]
