"""The prompts of benchmarks: the first questions of GSM8K, or of the shipped problems."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from deployments.demo_model import PROBLEMS

GSM8K = Path(__file__).parents[3] / "shared" / "data" / "gsm8k" / "test.jsonl"


def source(asked: Path | None = None) -> Path:
    """The jsonl file that prompts come from: the one asked for, GSM8K's beside the project, or the shipped one."""
    return asked or (GSM8K if GSM8K.is_file() else PROBLEMS)


def texts(path: Path, count: int) -> list[str]:
    """The first `count` questions of a file in GSM8K's format, from its start again where it has fewer."""
    with path.open(encoding="utf-8") as lines:
        questions = [json.loads(line)["question"] for _, line in zip(range(count), lines, strict=False)]
    return [questions[i % len(questions)] for i in range(count)]


def ids(tokenizer: Any, questions: list[str]) -> list[list[int]]:
    """Each question's token ids."""
    return [tokenizer(question)["input_ids"] for question in questions]
