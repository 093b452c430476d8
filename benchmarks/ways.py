"""The ways of generating that are compared, each with its best settings, and what they generate."""

from __future__ import annotations

import argparse
import itertools
import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.utils import logging as transformers_logging

from benchmarks.common import measured_models
from benchmarks.common.harness import DTYPES, ROOT, Tokens, Way, timed
from deployments.demo_model import PROBLEMS
from deployments.engine.edits import Edit
from deployments.engine.engine import Engine
from deployments.engine.request import Request
from deployments.points.capture import Capture

transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)

LAYERS = Capture(points=["layers.*.output"])
# By default its cache takes 60% of a machine's free memory. What it remembers of earlier prompts would be no work done.
BATCHING: dict[str, dict[str, Any]] = {
    "cpu": {"num_blocks": 64, "max_batch_tokens": 512, "allow_block_sharing": False},
    "cuda": {"allow_block_sharing": False},
}
GSM8K = ROOT.parent / "shared" / "data" / "gsm8k" / "test.jsonl"
_ids, _turns = itertools.count(), itertools.count()


@dataclass(frozen=True)
class Work:
    """What every way generates from.

    Attributes:
        prompts: Token ids of each request.
        new_tokens: How many tokens each generates, greedily and without end tokens.
        device: Where the model is.
    """

    prompts: list[list[int]]
    new_tokens: int
    device: str = "cpu"

    def settings(self) -> GenerationConfig:
        """The same as transformers' generation config."""
        return GenerationConfig(  # type: ignore[no-untyped-call]
            do_sample=False, max_new_tokens=self.new_tokens, pad_token_id=0, eos_token_id=None
        )

    def padded(self) -> tuple[torch.Tensor, torch.Tensor]:
        """[requests, longest] prompts padded on the left, and the mask that says so."""
        longest = max(map(len, self.prompts))
        ids = [[0] * (longest - len(prompt)) + prompt for prompt in self.prompts]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in self.prompts]
        return torch.tensor(ids, device=self.device), torch.tensor(mask, device=self.device)


def questions(count: int) -> list[str]:
    """The first questions of GSM8K's test set, where it is beside the project, or of the shipped problems.

    Each call numbers them anew: no turn's prompts begin as those of another, which servers may remember and not run.
    """
    lines = (GSM8K if GSM8K.is_file() else PROBLEMS).read_text(encoding="utf-8").splitlines()
    turn = next(_turns)
    return [f"Problem {turn:04}. {json.loads(lines[i % len(lines)])['question']}" for i in range(count)]


def add_options(parsing: argparse.ArgumentParser) -> None:
    """Add the options of benchmarks that generate: the model, and what it generates."""
    parsing.add_argument("--model", choices=measured_models.NAMES, default="random-40m")
    parsing.add_argument("--dtype", choices=DTYPES, default="float32")
    parsing.add_argument("--requests", type=int, default=32, help="requests at the same time")
    parsing.add_argument("--new-tokens", type=int, default=64)


def engine(running: Engine, work: Work, name: str, capture: Capture | None = None, edits: Sequence[Edit] = ()) -> Way:
    """All requests at once; what is captured stays in memory.

    Args:
        running: The engine, with nothing to do.
        work: What to generate.
        name: The way's.
        capture: What all requests record.
        edits: [requests] one of each, or none.
    """
    points = running.model.points.resolve(capture) if capture else ()
    common: dict[str, Any] = {"ignore_eos": True, "capture": capture, "points": points, "streamed": False}

    def run() -> Tokens:
        owner = f"turn {next(_ids)}"  # the engine would not run the beginnings of an owner's earlier prompts again
        asked = [Request(f"r{next(_ids)}", ids, work.new_tokens, owner=owner, **common) for ids in work.prompts]
        asked = [replace(one, edits=(edit,)) for one, edit in zip(asked, edits, strict=True)] if edits else asked
        return [list(done.tokens) for done in running.generate(asked)]

    return Way(name, lambda: timed(run, work.device))


def engine_steered(running: Engine, work: Work, name: str) -> Way:
    """All requests at once, each adding a vector of its own to the output of the layer in the middle.

    The vectors are zeros, which take as long as any others, so that the tokens can be compared.
    """
    model = running.model
    (point,) = model.points.named(f"layers.{model.points.layer_count // 2}.output", "point")
    vectors = torch.zeros(len(work.prompts), *point.shape, device=model.device)
    return engine(running, work, name, edits=[Edit(point, "add", vector=vector) for vector in vectors])


@contextmanager
def cloned(hf: Any, capture: bool) -> Iterator[None]:
    """With `capture`, clone the output of every layer by forward hooks, as one reads activations without nnsight."""
    kept: list[torch.Tensor] = []

    def keep(_: Any, __: Any, output: Any) -> None:
        kept.append(output.to("cpu", copy=True))

    with ExitStack() as hooks:
        for layer in hf.get_decoder().layers if capture else ():
            hooks.callback(layer.register_forward_hook(keep).remove)
        yield
    assert bool(kept) == capture


def static_generate(hf: Any, work: Work, name: str, capture: bool = False) -> Way:
    """`generate` on one perfect batch: all prompts at once, padded on the left, nobody joining or leaving."""
    ids, mask = work.padded()

    def run() -> Tokens:
        with torch.inference_mode(), cloned(hf, capture):
            out = hf.generate(ids, attention_mask=mask, generation_config=work.settings())
        return [row[ids.shape[1] :] for row in out.tolist()]

    return Way(name, lambda: timed(run, work.device))


def generate_batch(hf: Any, work: Work, name: str, capture: bool = False, persistent: bool = True) -> Way:
    """Transformers' continuous batching.

    Args:
        hf: The model; its attention implementation is the one used.
        work: What to generate.
        name: The way's.
        capture: Clone all layer outputs.
        persistent: Keep its thread and its cache from one turn to the next.
    """
    config = ContinuousBatchingConfig(**BATCHING[torch.device(work.device).type])
    settings = work.settings()
    settings.eos_token_id = -1  # its way of saying that there is none

    def run() -> Tokens:
        with cloned(hf, capture):
            out = hf.generate_batch(
                inputs=work.prompts,
                generation_config=settings,
                continuous_batching_config=config,
                persistent_manager=persistent,
            )
        return [list(answer.generated_tokens) for answer in out.values()]

    return Way(name, lambda: timed(run, work.device))


def nnsight_generate(hf: Any, tokenizer: Any, work: Work, name: str) -> Way:
    """Nnsight's `generate` on one static batch, all layer outputs in its cache."""
    import nnsight  # only here: machines with a GPU need not have it

    model = nnsight.TransformersModel(hf, tokenizer=tokenizer)
    ids, mask = work.padded()
    paths = [f"model.model.layers.{i}" for i in range(len(hf.get_decoder().layers))]

    @torch.inference_mode()
    def run() -> Tokens:
        with model.generate(ids, attention_mask=mask, generation_config=work.settings()) as tracer:
            cache = tracer.cache(modules=paths)
            out = nnsight.save(tracer.result)
        assert len(cache[paths[-1]].output) == work.new_tokens
        return [row[ids.shape[1] :] for row in out.tolist()]

    return Way(name, lambda: timed(run, work.device))
