"""The engine beside `transformers.generate`: `python -m benchmarks.engine`.

All ways run in turn, several times over, on the same weights and prompts in one process; the table gives
medians. `generate` is at its best: one static batch of all prompts, padded on the left, nobody joining or
leaving. Greedy tokens are compared, too: speed counts for nothing where they differ.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

from deployments.activations.spec import Capture
from deployments.demo_model import PROBLEMS, WEIGHTS
from deployments.engine.engine import Engine
from deployments.engine.model import Model
from deployments.engine.request import Request

Way = Callable[[], list[list[int]]]


def random_model() -> Any:
    """A random Qwen3 of 40M parameters: 12 layers of hidden size 512."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=4096,
        hidden_size=512,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        intermediate_size=1536,
        max_position_embeddings=4096,
    )
    return AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]


def prompts(path: Path, tokenizer: Any, count: int) -> list[list[int]]:
    """The first questions of a GSM8K jsonl file as token ids."""
    with path.open(encoding="utf-8") as lines:
        questions = [json.loads(line)["question"] for _, line in zip(range(count), lines, strict=False)]
    return [tokenizer(question)["input_ids"] for question in questions]


def ways(plain: Any, model: Model, batch: Sequence[Sequence[int]], new_tokens: int) -> dict[str, Way]:
    """What is measured: a name and a function that generates for the whole batch.

    Args:
        plain: The same weights without nnsight, so that the peer is at its best.
        model: The engine's.
        batch: Prompts as token ids.
        new_tokens: Tokens to generate for each.
    """
    plain.generation_config.eos_token_id = None  # all ways generate to the full length
    longest = max(map(len, batch))
    ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in batch])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in batch])

    def static_generate() -> list[list[int]]:
        with torch.inference_mode():
            out = plain.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=new_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        return [row[longest:] for row in out.tolist()]

    def engine(capture: Capture | None = None) -> list[list[int]]:
        points = model.points.resolve(capture) if capture else ()
        requests = [
            Request(str(i), prompt, new_tokens, ignore_eos=True, capture=capture, points=points)
            for i, prompt in enumerate(batch)
        ]
        done = running.generate(requests)
        return [list(finished.tokens) for finished in done]

    running = Engine(model)
    everything = Capture(points=["layers.*.output"])
    return {
        "transformers generate, one static batch": static_generate,
        "engine": engine,
        "engine, all layer outputs captured": lambda: engine(everything),
    }


def measure(named: dict[str, Way], tokens: int, repeats: int) -> dict[str, dict[str, Any]]:
    """Run all ways in turn `repeats` times; tokens per second of each, and how many tokens agree."""
    seconds: dict[str, list[float]] = {name: [] for name in named}
    outputs: dict[str, list[list[int]]] = {}
    for name, way in named.items():  # once for nothing: memory, caches
        outputs[name] = way()
    for _ in range(repeats):
        for name, way in named.items():
            began = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - began)
    reference = next(iter(outputs.values()))
    return {
        name: {
            "tokens_per_second": tokens / statistics.median(seconds[name]),
            "all": [tokens / taken for taken in seconds[name]],
            "prompts_with_the_same_tokens": sum(a == b for a, b in zip(outputs[name], reference, strict=True)),
        }
        for name in named
    }


def report(title: str, results: dict[str, dict[str, Any]], count: int) -> None:
    """Print a table, ratios to its first row."""
    base = next(iter(results.values()))["tokens_per_second"]
    print(f"\n{title}")
    print(f"{'':45}{'tokens/s':>10}{'ratio':>8}{'same tokens':>14}")
    for name, row in results.items():
        rate, same = row["tokens_per_second"], row["prompts_with_the_same_tokens"]
        print(f"{name:45}{rate:>10.0f}{rate / base:>8.2f}{f'{same} of {count}':>14}")


def main() -> int:
    """Measure both models and keep the numbers as JSON; 1 where the engine is behind the static batch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=32, help="how many at once")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--prompts", type=Path, default=PROBLEMS, help="a jsonl file in GSM8K's format")
    parser.add_argument("--model", choices=["random-40m", "demo"], action="append")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of torch")
    parser.add_argument("--json", type=Path, default=Path("results/benchmark-engine.json"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tokenizer = AutoTokenizer.from_pretrained(WEIGHTS)
    loaders: dict[str, Callable[[], Any]] = {
        "random-40m": random_model,
        "demo": lambda: AutoModelForCausalLM.from_pretrained(WEIGHTS),
    }
    kept: dict[str, Any] = {"torch": torch.__version__, "machine": platform.platform(), "threads": options.threads}
    for name in options.model or loaders:
        batch = prompts(options.prompts, tokenizer, options.requests)
        hf = loaders[name]().float().eval()
        plain = copy.deepcopy(hf)
        model = Model(hf, tokenizer, name)
        tokens = options.requests * options.new_tokens
        kept[name] = measure(ways(plain, model, batch, options.new_tokens), tokens, options.repeats)
        report(f"{name}: {options.requests} requests at once, {options.new_tokens} new tokens", kept[name], len(batch))
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(kept, indent=2))
    print(f"\nKept in {options.json}")
    rates = [{way: row["tokens_per_second"] for way, row in kept[name].items()} for name in options.model or loaders]
    return int(any(rate["engine"] < rate["transformers generate, one static batch"] for rate in rates))


if __name__ == "__main__":
    sys.exit(main())
