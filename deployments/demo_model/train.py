"""Train the demo model from nothing: `python -m deployments.demo_model.train --out DIR`."""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import AttentionInterface, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from deployments.demo_model.dialogues import CALCULATOR, conversation
from deployments.demo_model.evaluate import measure
from deployments.demo_model.problems import TRAIN_SEED, VALIDATION_SEED, Problem, held_out, stream
from deployments.demo_model.tokenizer import CONTEXT, train_tokenizer

STEPS = 3600
BATCH_TOKENS = 6144
CHUNK = 4096
TOKENIZER_SAMPLE = 8000
TOOL_SHARE = 0.35
HELD_OUT = 1200
MUON_RATE, ADAM_RATE, WARMUP, DECAY_FROM = 0.02, 3e-3, 100, 0.5

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
        texts += renderer.apply_chat_template(conversations, tools=[CALCULATOR] if tools else None, tokenize=False)
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


def rate(step: int, steps: int) -> float:
    """The learning rate's factor: a short warm-up, a plateau, a straight fall to zero."""
    return min(1.0, (step + 1) / WARMUP, (steps - step) / (steps * (1 - DECAY_FROM)))


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


def train(out: Path, steps: int, check_every: int) -> None:
    """Train for `steps` steps, with a check on validation problems now and then, and save to `out`."""
    torch.manual_seed(TRAIN_SEED)
    rng = random.Random(TRAIN_SEED)
    problems = stream(TRAIN_SEED, frozenset(problem.question for problem in held_out(HELD_OUT)))
    sample = list(islice(stream(TRAIN_SEED), TOKENIZER_SAMPLE))
    # A tokenizer trained on nothing already renders the template.
    tokenizer = train_tokenizer(render(sample, random.Random(TRAIN_SEED), train_tokenizer([])))
    model = new_model(tokenizer)
    body = torch.compile(model.model, dynamic=True)
    tuned = optimizers(model)
    checks = list(islice(stream(VALIDATION_SEED), 60))
    questions, gold = [p.question for p in checks], [p.answer for p in checks]
    save(model, tokenizer, out)
    begun, tokens, mean = time.time(), 0, 0.0
    for step, batch in enumerate(islice(batches(tokenizer, problems, rng), steps), start=1):
        for optimizer, base in zip(tuned, (MUON_RATE, ADAM_RATE), strict=True):
            optimizer.param_groups[0]["lr"] = base * rate(step - 1, steps)
        loss = loss_of(model, body, batch)
        loss.backward()
        for optimizer in tuned:
            optimizer.step()
            optimizer.zero_grad()
        tokens += batch[0].numel()
        mean = loss.item() if step == 1 else 0.98 * mean + 0.02 * loss.item()
        if step % 50 == 0:
            print(f"step {step} loss {mean:.4f} tokens {tokens} cpu {time.process_time():.0f}s "
                  f"wall {time.time() - begun:.0f}s", flush=True)  # fmt: skip
        if step % check_every == 0 or step == steps:
            save(model, tokenizer, out)
            saved: Any = Qwen3ForCausalLM.from_pretrained(out)
            print(json.dumps(measure(saved.eval(), tokenizer, questions, gold)), flush=True)


def main() -> None:
    """Read the options and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--check-every", type=int, default=600)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    train(options.out, options.steps, options.check_every)


if __name__ == "__main__":
    main()
