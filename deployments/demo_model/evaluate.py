"""Measure the demo model with and without the calculator: `python -m deployments.demo_model.evaluate`."""

from __future__ import annotations

import argparse
import json
import math
import re
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from deployments.demo_model import PROBLEMS, WEIGHTS
from deployments.demo_model.calculator import TOOL, answer_call
from deployments.demo_model.dialogues import INSTRUCTION, Message
from deployments.demo_model.problems import held_out

MAX_TURNS = 8
MAX_NEW_TOKENS = 200
BATCH = 100
DEMO_COUNT = 200


def final_answer(text: str) -> int | None:
    """The integer after the last `####`, or None."""
    found = re.findall(r"####\s*(-?[\d,]+)", text)
    digits = found[-1].replace(",", "") if found else ""
    return int(digits) if digits.lstrip("-").isdigit() else None


@torch.inference_mode()
def reply(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    conversations: list[list[Message]],
    tools: bool,
) -> list[Message]:
    """The model's next message in each conversation, decoded greedily as one batch."""
    prompts: Any = tokenizer.apply_chat_template(
        conversations, tools=[TOOL] if tools else None, tokenize=False, add_generation_prompt=True
    )
    # Padding on the left, so that all prompts end where generation begins: ids [batch, length].
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    inputs.pop("token_type_ids", None)
    generate: Any = model.generate
    output = generate(**inputs, do_sample=False, max_new_tokens=MAX_NEW_TOKENS)
    new = output[:, inputs["input_ids"].shape[1] :]
    texts = tokenizer.batch_decode(new, skip_special_tokens=True)
    return [_parse(tokenizer, text, prompt) for text, prompt in zip(texts, prompts, strict=True)]


def _parse(tokenizer: PreTrainedTokenizerFast, text: str, prompt: str) -> Message:
    try:
        return dict(tokenizer.parse_response(text, prefix=prompt))
    except ValueError:  # A call that is no JSON counts as plain text.
        return {"role": "assistant", "content": text}


def _solve_batch(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, questions: list[str], tools: bool
) -> list[int | None]:
    conversations: list[list[Message]] = [[{"role": "user", "content": q + INSTRUCTION}] for q in questions]
    answers: list[int | None] = [None] * len(questions)
    open_ones = list(range(len(questions)))
    for _ in range(MAX_TURNS if tools else 1):
        messages = reply(model, tokenizer, [conversations[i] for i in open_ones], tools)
        waiting = []
        for i, message in zip(open_ones, messages, strict=True):
            conversations[i].append(message)
            calls = message.get("tool_calls") or []
            for call in calls:
                function = call["function"]
                result = answer_call(function.get("name", ""), json.dumps(function.get("arguments") or {}))
                conversations[i].append({"role": "tool", "content": result})
            if calls:
                waiting.append(i)
            else:
                answers[i] = final_answer(message.get("content") or "")
        open_ones = waiting
        if not open_ones:
            break
    return answers


def solve(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, questions: list[str], tools: bool
) -> list[int | None]:
    """The model's final answers, greedily, with or without the calculator; None where it gives none."""
    answers: list[int | None] = []
    for start in range(0, len(questions), BATCH):
        answers += _solve_batch(model, tokenizer, questions[start : start + BATCH], tools)
    return answers


def summary(plain: list[bool], tooled: list[bool]) -> dict[str, float]:
    """Both accuracies with standard errors and the paired difference with its 95% interval, in percent."""
    count = len(plain)
    differences = [float(b) - float(a) for a, b in zip(plain, tooled, strict=True)]
    error = stdev(differences) / math.sqrt(count)
    figures: dict[str, float] = {"problems": count}
    for name, right in (("without_tools", plain), ("with_tools", tooled)):
        rate = fmean(right)
        figures[name] = round(100 * rate, 1)
        figures[f"{name}_se"] = round(100 * math.sqrt(rate * (1 - rate) / count), 1)
    figures["difference"] = round(100 * fmean(differences), 1)
    figures["difference_low"] = round(100 * (fmean(differences) - 1.96 * error), 1)
    figures["difference_high"] = round(100 * (fmean(differences) + 1.96 * error), 1)
    return figures


def grade(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, questions: list[str], gold: list[int]
) -> tuple[list[bool], list[bool]]:
    """Which questions the model gets right, without and with the calculator."""
    plain, tooled = (
        [answer == truth for answer, truth in zip(solve(model, tokenizer, questions, tools), gold, strict=True)]
        for tools in (False, True)
    )
    return plain, tooled


def read_problems(path: Path) -> tuple[list[str], list[int]]:
    """Questions and gold answers of a GSM8K jsonl file."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    gold = [final_answer(record["answer"]) for record in records]
    return [record["question"] for record in records], [number for number in gold if number is not None]


def main() -> None:
    """Print the figures for the demo set and for held-out problems."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", type=Path, default=WEIGHTS)
    parser.add_argument("--count", type=int, default=600, help="held-out problems beside the demo set")
    options = parser.parse_args()
    tokenizer: Any = AutoTokenizer.from_pretrained(options.weights)
    model = AutoModelForCausalLM.from_pretrained(options.weights, dtype=torch.float32).eval()  # type: ignore[no-untyped-call]
    print("demo", json.dumps(summary(*grade(model, tokenizer, *read_problems(PROBLEMS)))), flush=True)
    problems = held_out(DEMO_COUNT + options.count)[DEMO_COUNT:]
    grades = grade(model, tokenizer, [p.question for p in problems], [p.answer for p in problems])
    for kind, wanted in (("held-out", (False, True)), ("easy", (False,)), ("hard", (True,))):
        chosen = [i for i, problem in enumerate(problems) if problem.hard in wanted]
        print(kind, json.dumps(summary(*([grades[k][i] for i in chosen] for k in (0, 1)))), flush=True)


if __name__ == "__main__":
    main()
