"""Train the demo model from scratch: `python -m deployments.demo_model.train --out DIR`."""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import AttentionInterface, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from deployments.demo_model.calculator import TOOL
from deployments.demo_model.dialogues import conversation
from deployments.demo_model.evaluate import grade, summary
from deployments.demo_model.problems import HARD_SHARE, TRAIN_SEED, VALIDATION_SEED, Problem, held_out, stream
from deployments.demo_model.tokenizer import CONTEXT, train_tokenizer


@dataclass(frozen=True)
class Phase:
    """A stretch of training with its own stream of problems and fresh optimizers.

    Attributes:
        seed: Of the stream and of the order of the batches.
        steps: How many batches.
        hard_share: The share of problems with a hard product.
        falling: Whether the learning rate falls to zero over the phase or stays.
    """

    seed: int
    steps: int
    hard_share: float
    falling: bool


PHASES = (
    Phase(seed=TRAIN_SEED, steps=1200, hard_share=0.42, falling=False),
    Phase(seed=TRAIN_SEED + 1, steps=1300, hard_share=HARD_SHARE, falling=True),
)
BATCH_TOKENS = 6144
CHUNK = 4096
TOKENIZER_SAMPLE = 8000
TOOL_SHARE = 0.35
HELD_OUT = 1200
MUON_RATE, ADAM_RATE, WARMUP = 0.02, 3e-3, 100

Batch = tuple[torch.Tensor, torch.Tensor]


def causal_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Plain causal attention, which compiles to something faster on a CPU than the fused kernel.

    Args:
        module: The attention layer, unused.
        query: [batch, heads, length, head_dim].
        key: [batch, key heads, length, head_dim].
        value: As `key`.
        attention_mask: Unused: padding stands on the right.
        scaling: Factor for the scores.
        options: Unused.

    Returns:
        The heads' outputs, [batch, length, heads, head_dim], and None for the weights.
    """
    batch, heads, length, size = query.shape
    groups = query.reshape(batch, key.shape[1], -1, length, size) * scaling
    scores = groups @ key.unsqueeze(2).transpose(-1, -2)
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(later, float("-inf")).float().softmax(-1).to(value.dtype)
    return (weights @ value.unsqueeze(2)).reshape(batch, heads, length, size).transpose(1, 2), None


AttentionInterface.register("causal", causal_attention)


def new_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A fresh Qwen3 of about 2.4 million parameters, set up for training."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=448,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=48,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype=torch.float32,
    )
    model = Qwen3ForCausalLM(config)
    model.set_attn_implementation("causal")
    return model


def render(problems: list[Problem], rng: random.Random, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Training conversations as text; the share `TOOL_SHARE` of them uses the calculator."""
    renderer: Any = tokenizer
    texts: list[str] = []
    split = round(len(problems) * TOOL_SHARE)
    for tools, part in ((True, problems[:split]), (False, problems[split:])):
        conversations = [conversation(problem, tools, rng) for problem in part]
        texts += renderer.apply_chat_template(conversations, tools=[TOOL] if tools else None, tokenize=False)
    return texts


def spoken(ids: list[int], opening: list[int], end: int) -> list[bool]:
    """Marks the tokens the assistant says, `<|im_end|>` included, among the tokens of a conversation."""
    marks = [False] * len(ids)
    speaking = False
    width = len(opening)
    for i, token in enumerate(ids):
        marks[i] = speaking
        speaking = token != end if speaking else ids[i + 1 - width : i + 1] == opening
    return marks


def batches(tokenizer: PreTrainedTokenizerFast, problems: Iterator[Problem], rng: random.Random) -> Iterator[Batch]:
    """Endless batches of about `BATCH_TOKENS` tokens: ids and loss marks, both [batch, length]."""
    opening = tokenizer("<|im_start|>assistant\n").input_ids
    end, pad = int(tokenizer.eos_token_id), int(tokenizer.pad_token_id)
    while True:
        texts = render(list(islice(problems, CHUNK)), rng, tokenizer)
        rows = sorted(tokenizer(texts).input_ids, key=len)
        chunk = []
        while rows:
            # Equal lengths go together; a length that is a multiple of 16 spares compilations.
            length = -(-len(rows[-1]) // 16) * 16
            count = max(1, BATCH_TOKENS // length)
            rows, taken = rows[:-count], rows[-count:]
            taken = (taken * count)[:count]  # Only the last batch is short: its rows are repeated.
            ids = torch.tensor([row + [pad] * (length - len(row)) for row in taken])
            marks = [spoken(row, opening, end) + [False] * (length - len(row)) for row in taken]
            chunk.append((ids, torch.tensor(marks)))
        rng.shuffle(chunk)
        yield from chunk


def rate(step: int, phase: Phase) -> float:
    """The learning rate's factor at a step of a phase, counted from 0."""
    return min((step + 1) / WARMUP, 1 - step / phase.steps if phase.falling else 1.0)


def optimizers(model: Qwen3ForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for the embedding and the norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=MUON_RATE, weight_decay=0.01),
        torch.optim.AdamW(others, lr=ADAM_RATE, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def loss_of(model: Qwen3ForCausalLM, body: Any, batch: Batch) -> torch.Tensor:
    """Mean cross-entropy over the assistant's tokens; pads stand on the right, so no mask is needed."""
    ids, marks = batch
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = body(input_ids=ids[:, :-1], use_cache=False).last_hidden_state[marks[:, 1:]]
        logits = model.lm_head(hidden)
    return cross_entropy(logits.float(), ids[:, 1:][marks[:, 1:]])


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write weights, configuration and tokenizer so that `from_pretrained` reads them."""
    generation: Any = model.generation_config
    generation.update(
        do_sample=False,
        max_new_tokens=256,
        eos_token_id=[tokenizer.eos_token_id, tokenizer.pad_token_id],
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def run(phase: Phase, model: Qwen3ForCausalLM, body: Any, tokenizer: PreTrainedTokenizerFast) -> Iterator[float]:
    """Train for one phase; yields the loss of each step."""
    rng = random.Random(phase.seed)
    excluded = frozenset(problem.question for problem in held_out(HELD_OUT))
    problems = stream(phase.seed, excluded, phase.hard_share)
    tuned = optimizers(model)
    for step, batch in enumerate(islice(batches(tokenizer, problems, rng), phase.steps)):
        for optimizer, base in zip(tuned, (MUON_RATE, ADAM_RATE), strict=True):
            optimizer.param_groups[0]["lr"] = base * rate(step, phase)
        loss = loss_of(model, body, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        for optimizer in tuned:
            optimizer.step()
            optimizer.zero_grad()
        yield loss.item()


def train(out: Path, resume: bool, check_every: int) -> None:
    """Train all phases, with periodic validation, and save to `out`."""
    torch.manual_seed(TRAIN_SEED)
    sample = list(islice(stream(TRAIN_SEED, hard_share=PHASES[0].hard_share), TOKENIZER_SAMPLE))
    # A tokenizer trained on nothing already renders the template.
    tokenizer = train_tokenizer(render(sample, random.Random(TRAIN_SEED), train_tokenizer([])))
    model = new_model(tokenizer)
    if resume:
        model.load_state_dict(Qwen3ForCausalLM.from_pretrained(out).state_dict())
    body = torch.compile(model.model, dynamic=True)
    checks = list(islice(stream(VALIDATION_SEED), 60))
    begun, mean = time.time(), 0.0
    for phase in PHASES[1:] if resume else PHASES:
        for step, loss in enumerate(run(phase, model, body, tokenizer), start=1):
            mean = loss if step == 1 else 0.98 * mean + 0.02 * loss
            if step % 50 == 0:
                spent = f"cpu {time.process_time():.0f}s wall {time.time() - begun:.0f}s"
                print(f"seed {phase.seed} step {step} loss {mean:.4f} {spent}", flush=True)
            if step % check_every == 0 or step == phase.steps:
                save(model, tokenizer, out)
                saved: Any = Qwen3ForCausalLM.from_pretrained(out)
                right = grade(saved.eval(), tokenizer, [p.question for p in checks], [p.answer for p in checks])
                print(json.dumps(summary(*right)), flush=True)


def main() -> None:
    """Read the options and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", action="store_true", help="begin the second phase from the weights in --out")
    parser.add_argument("--check-every", type=int, default=600)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    train(options.out, options.resume, options.check_every)


if __name__ == "__main__":
    main()
