"""A model of random weights, with an engine and with transformers' own `generate` on the same weights."""

from __future__ import annotations

import copy
import gc
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from benchmarks import ways
from benchmarks.common import measured_models
from benchmarks.common.harness import synchronize
from deployments.engine.edits import Edit
from deployments.engine.engine import Engine
from deployments.engine.request import Finished, Request
from deployments.model.model import Model
from deployments.points.capture import Capture

WORDS = 4096  # token ids with a word: only these are likely
LIKELY = 8.0  # factor of these tokens' rows in the head: few tokens have nearly the same logit, and others none
FIRST_STEPS = 6  # decode steps that are not measured: in one of them a CUDA graph is captured
PREFILL_TOKENS = 16384  # while decoding is measured: few steps then run prompts beside it
SERVED_CAPTURE_BYTES = 192 << 20  # the server's default
Found = Iterator[tuple[str, Any]]  # a section's findings with their names


@dataclass(frozen=True)
class Plan:
    """What a section runs.

    Attributes:
        size: The model's shape.
        device: Where it runs.
    """

    size: str
    device: str

    @property
    def tiny(self) -> bool:
        """Whether all sizes are for a test on a CPU."""
        return self.size == "tiny"

    @property
    def rows(self) -> tuple[int, ...]:
        """Numbers of sequences that decode together."""
        return (1, 3) if self.tiny else (1, 32, 128)

    @property
    def contexts(self) -> dict[str, tuple[int, int]]:
        """The lengths of prompts: least and most."""
        if self.tiny:
            return {"80": (8, 8), "mixed": (2, 16)}
        return {"80": (80, 80), "mixed": (16, 1024), "1000": (1000, 1000)}

    @property
    def prompts(self) -> tuple[tuple[int, int], ...]:
        """Numbers of prompts and their lengths."""
        return ((1, 40), (3, 16)) if self.tiny else ((1, 4096), (32, 512), (128, 1000))

    @property
    def steps(self) -> int:
        """Decode steps that are measured."""
        return 4 if self.tiny else 24


class Case:
    """An engine's model and transformers' own, on the same weights."""

    def __init__(self, plan: Plan, dtype: torch.dtype | None = None) -> None:
        """Make random weights on the device."""
        self.plan, self.device = plan, plan.device
        dtype = dtype or (torch.float32 if plan.tiny else torch.bfloat16)
        with torch.device(self.device):
            self.hf = measured_models.build(plan.size, dtype, self.device)
        with torch.no_grad():
            self.hf.get_output_embeddings().weight[:WORDS] *= LIKELY
        own = copy.deepcopy(self.hf, {id(weight): weight for weight in self.hf.parameters()})  # the same weights
        self.model = Model(own, tokenizer(min(WORDS, self.hf.config.vocab_size)), plan.size)
        skipped = self.hf.get_input_embeddings().weight  # a step reads few of its rows
        self.weight_bytes = sum(weight.nbytes for weight in self.hf.parameters() if weight is not skipped)
        shape = self.hf.config
        self.kv_bytes = 2 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim * dtype.itemsize

    def requests(
        self, rows: int, lengths: tuple[int, int], new: int, points: Sequence[str] = (), **more: Any
    ) -> list[Request]:
        """Random prompts of lengths between two, as requests.

        Args:
            rows: How many.
            lengths: The least and the most tokens of a prompt.
            new: Tokens that each generates.
            points: What each records.
            more: Further fields of `Request`.
        """
        numbers = random.Random(rows)
        if points:
            capture = Capture(points=list(points))
            more |= {"capture": capture, "points": self.model.points.resolve(capture)}
        more.setdefault("streamed", False)
        return [
            Request(
                str(number),
                [numbers.randrange(self.model.vocabulary) for _ in range(numbers.randint(*lengths))],
                new,
                ignore_eos=True,
                **more,
            )
            for number in range(rows)
        ]

    def release(self) -> None:
        """Free the memory of engines that are no longer used."""
        gc.collect()
        if torch.device(self.device).type == "cuda":
            torch.cuda.empty_cache()

    def engine(self, rows: int, **options: Any) -> Engine:
        """A new engine, after its predecessor's memory is free."""
        self.release()
        return Engine(self.model, max_running=rows, kv_fraction=0.6, **options)

    def decode(self, requests: Sequence[Request]) -> float:
        """Tokens per second from `FIRST_STEPS` after the step in which all requests decode until the first one ends."""
        engine = self.engine(len(requests), prefill_tokens=PREFILL_TOKENS)
        for request in requests:
            engine.submit(request)
        began, first, ended, decodes = None, 0, 0, 0
        while ended < len(requests):
            tokens = engine.statistics.tokens
            for event in engine.step(wait=True):
                if isinstance(event, Finished) and not ended:
                    synchronize(self.device)
                    assert began is not None, "a request ended before all of them decoded"
                    found = (engine.statistics.tokens - first) / (time.perf_counter() - began)
                ended += isinstance(event, Finished)
            decodes += engine.statistics.tokens - tokens == len(requests)
            if began is None and decodes == FIRST_STEPS:
                synchronize(self.device)
                began, first = time.perf_counter(), engine.statistics.tokens
        return found

    def new_tokens(self, rows: int, lengths: tuple[int, int]) -> int:
        """How many tokens requests generate so that all decode together for the steps that are measured."""
        return self.plan.steps + FIRST_STEPS + 4 + rows * lengths[1] // PREFILL_TOKENS

    def total(self, requests: Sequence[Request], **options: Any) -> float:
        """Seconds from the first step until all requests have ended and their rows are on the host."""
        engine, left = self.engine(len(requests), **options), len(requests)
        synchronize(self.device)
        began = time.perf_counter()
        for request in requests:
            engine.submit(request)
        while left:
            for event in engine.step(wait=True):
                left -= isinstance(event, Finished)
                if (captured := getattr(event, "captured", None)) is not None:
                    engine.written(event.id, captured.bytes)
        synchronize(self.device)
        return time.perf_counter() - began

    def generate(self, prompts: Sequence[Sequence[int]], new: int) -> float:
        """Seconds in which transformers' `generate` gives new tokens to prompts padded on the left."""
        work = ways.Work([list(prompt) for prompt in prompts], new, self.device)
        return ways.static_generate(self.hf, work, "generate").run().seconds

    def steering(self, seed: int = 0) -> Edit:
        """A random vector, half as long as a layer's output at first, added in the middle."""
        points = self.model.points
        (point,) = points.named(f"layers.{points.layer_count // 2}.output", "point")
        vector = 0.5 * torch.randn(point.shape, generator=torch.Generator().manual_seed(seed))
        return Edit(point, "add", vector=vector.to(self.device))


def tokenizer(words: int) -> PreTrainedTokenizerFast:
    """A word for each of so many token ids."""
    model = models.WordLevel({f" w{id}": id for id in range(words)}, unk_token=" w0")
    backend = Tokenizer(cast("Any", model))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend)  # type: ignore[no-untyped-call]
