"""The options that benchmarks which generate share."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from benchmarks.common import findings, measured_models, questions
from benchmarks.common.work import Work

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def parser(description: str | None, results: str) -> argparse.ArgumentParser:
    """A parser with the options of benchmarks that generate; arguments as for `findings.parser_of`."""
    made = findings.parser_of(description, results)
    made.add_argument("--requests", type=int, default=32, help="how many at once")
    made.add_argument("--new-tokens", type=int, default=64)
    made.add_argument("--prompts", type=Path, help="a jsonl file in GSM8K's format; GSM8K if found, else those shipped")
    made.add_argument("--model", choices=measured_models.NAMES, action="append", help="again for more than one")
    made.add_argument("--dtype", choices=DTYPES, action="append", help="again for more than one")
    return made


def work(name: str, options: argparse.Namespace, device: str = "cpu", new_tokens: int | None = None) -> Work:
    """The prompts that a model gets, and how many tokens it generates.

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
    """The names of dtypes asked for; else float32, and bfloat16 where the hardware has units for it."""
    if options.dtype:
        return list(options.dtype)
    has_units = torch.device(device).type == "cuda" or torch.cpu.get_capabilities().get("avx512_bf16", False)
    return ["float32", "bfloat16"] if has_units else ["float32"]
