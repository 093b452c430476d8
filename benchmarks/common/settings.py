"""The options that the benchmarks share."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch

from benchmarks.common import measured_models, questions
from benchmarks.ways.peers import Work

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def parser(description: str | None, results: str) -> argparse.ArgumentParser:
    """A parser with the shared options.

    Args:
        description: The benchmark's own.
        results: The name its results have below `results/`.
    """
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--requests", type=int, default=32, help="how many at once")
    made.add_argument("--new-tokens", type=int, default=64)
    made.add_argument("--rounds", type=int, default=5)
    made.add_argument("--prompts", type=Path, help="a jsonl file in GSM8K's format; GSM8K if found, else those shipped")
    made.add_argument("--model", choices=measured_models.NAMES, action="append", help="again for more than one")
    made.add_argument("--dtype", choices=DTYPES, action="append", help="again for more than one")
    made.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of torch")
    made.add_argument("--results", type=Path, default=Path("results") / results, help="without a suffix")
    return made


def work(name: str, options: argparse.Namespace, device: str = "cpu", new_tokens: int | None = None) -> Work:
    """What a model is to generate.

    Args:
        name: The model's, for its tokenizer.
        options: Of `parser`.
        device: Where the model is.
        new_tokens: Other than asked for.
    """
    texts = questions.texts(questions.source(options.prompts), options.requests)
    ids = questions.ids(measured_models.tokenizer(name), texts)
    return Work(ids, new_tokens or options.new_tokens, device)


def dtypes(options: argparse.Namespace, device: str = "cpu") -> list[str]:
    """Those asked for; else float32, and bfloat16 where the hardware has units for it."""
    if options.dtype:
        return list(options.dtype)
    has_units = torch.device(device).type == "cuda" or torch.cpu.get_capabilities().get("avx512_bf16", False)
    return ["float32", "bfloat16"] if has_units else ["float32"]
