import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_openai import FakeServer

from deployments.demo_model import INSTRUCTION
from evals.config import EvalError
from evals.gsm8k.__main__ import main
from evals.gsm8k.options import parse_args
from evals.scoring import is_correct
from evals.task.problems import EXAMPLES, load_few_shot, question_id
from evals.task.prompts import Example

Write = Callable[..., Path]


def examples(asked: set[str], *argv: str) -> list[Example]:
    return load_few_shot(parse_args(argv), asked)


def test_the_shipped_examples_are_gsm8ks_format_and_right() -> None:
    rows = [json.loads(line) for line in EXAMPLES.read_text().splitlines()]
    assert len({row["question"] for row in rows}) == 8
    assert all(is_correct(row["answer"], row["answer"]) for row in rows)
    for row in rows:
        for step in row["answer"].splitlines()[:-1]:
            sides = [side.split()[0] for side in step.split("=")[1:]]
            assert eval(step.split("=")[0].split()[-1]) == int(sides[0])  # noqa: S307


def test_examples_come_from_a_file_that_is_named_else_from_those_that_ship(write_problems: Write) -> None:
    path = write_problems("[a]", "[b]")
    asked = question_id("[b] What is 1 + 1000?")  # which is no example then
    assert [one.question for one in examples({asked}, "--few-shot", str(path))] == ["[a] What is 0 + 1000?"]
    shipped = [json.loads(line)["question"] for line in EXAMPLES.read_text().splitlines()]
    assert [one.question for one in examples(set(), "--few-shot", "3")] == shipped[:3]
    assert examples(set()) == []


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--few-shot", "9"], "has only 8"),
        (["--few-shot", "absent.jsonl"], r"--few-shot \S+absent.jsonl: no file"),
    ],
)
def test_examples_that_are_not_there_are_said(argv: list[str], says: str) -> None:
    with pytest.raises(EvalError, match=says):
        examples(set(), *argv)


@pytest.mark.usefixtures("cluster")
def test_each_problem_is_asked_in_each_variant_after_the_examples(
    server: FakeServer, write_problems: Write, tmp_path: Path
) -> None:
    path = write_problems(*[""] * 3)
    argv = ["--base-url", server.base_url, "--dataset", str(path), "--results-dir", str(tmp_path / "results")]
    argv += ["--mode", "no-tools", "--variants", "control,calm", "--few-shot", "2", "--parallel", "1"]
    assert main(argv) == 0
    told: dict[str, Any] = json.loads((tmp_path / "results" / "config.json").read_text())["prompts"]
    assert [len(body["messages"]) for body in server.requests] == [5] * 6
    roles = [message["role"] for message in server.requests[0]["messages"]]
    assert roles == ["user", "assistant", "user", "assistant", "user"]
    shown = [message["content"] for message in server.requests[0]["messages"][:4]]
    first, second = told["few_shot"]
    assert shown[:2] == [first["question"] + INSTRUCTION, first["answer"]]
    assert shown[2:] == [second["question"] + INSTRUCTION, second["answer"]]
    assert told["instruction"] == INSTRUCTION
    # One after the other: both variants of a problem, then those of the next.
    asked = [body["messages"][-1]["content"] for body in server.requests]
    questions = [f" What is {i} + 1000?{INSTRUCTION}" for i in range(3)]
    calm = told["variants"]["calm"]
    assert asked == [text for question in questions for text in (question, f"{calm}\n\n{question}")]
