import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from evals.config import EvalError
from evals.gsm8k.options import parse_args
from evals.task.problems import load_few_shot, load_problems
from evals.task.trajectory import Problem

Write = Callable[..., Path]


def load(path: Path | str, *options: str) -> list[Problem]:
    table = load_problems(parse_args(["--dataset", str(path), *options]))
    return [Problem(**row) for row in table.to_pylist()]


def test_the_first_samples_are_the_files_first(write_problems: Write) -> None:
    problems = load(write_problems(*[""] * 9), "--samples", "3")
    assert [problem.gold for problem in problems] == ["1000", "1001", "1002"]


def test_parquet_gives_the_same_problems_as_jsonl(write_problems: Write, tmp_path: Path) -> None:
    path = write_problems(*[""] * 5)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "p.parquet")
    assert load(tmp_path / "p.parquet") == load(path)


def test_a_seed_chooses_the_same_whatever_the_order_of_the_file(write_problems: Write, tmp_path: Path) -> None:
    path = write_problems(*[""] * 40)
    turned = tmp_path / "turned.jsonl"
    turned.write_text("".join(reversed(path.read_text().splitlines(keepends=True))))
    ten = load(path, "--samples", "10", "--seed", "1")
    assert ten == load(turned, "--samples", "10", "--seed", "1")
    assert ten == load(path, "--samples", "20", "--seed", "1")[:10] == load(path, "--seed", "1")[:10]
    assert ten != load(path, "--samples", "10", "--seed", "2")


def test_a_repeated_question_is_asked_once(write_problems: Write) -> None:
    path = write_problems(*[""] * 3)
    path.write_text(path.read_text() * 2)
    assert len({problem.id for problem in load(path)}) == len(load(path)) == 3


ODD_ROWS = [
    ({"question": None, "answer": "#### 1"}, "the question is None, not a text"),
    ({"question": " ", "answer": "#### 1"}, "the question is ' ', not a text"),
    ({"question": "Why?", "answer": None}, "the answer is None, not a text"),
    ({"question": "Why?", "answer": ""}, "the answer is '', not a text"),
    ({"question": "Why?", "answer": "It is 1."}, "an answer without #### and a number: 'It is 1.'"),
    ({"question": " What is 1 + 1000?", "answer": "#### 7"}, "with another answer: 7 and 1001"),
]


@pytest.mark.parametrize(("row", "says"), ODD_ROWS)
def test_a_row_that_cannot_be_asked_or_scored_is_refused_with_its_place(
    write_problems: Write, tmp_path: Path, row: dict[str, str | None], says: str
) -> None:
    lines = write_problems("", "").read_text().splitlines()
    path = tmp_path / "odd.jsonl"
    path.write_text("\n".join([lines[0], "", lines[1], "", json.dumps(row), ""]))
    with pytest.raises(EvalError) as refused:
        load(path)
    assert str(refused.value).startswith(f"{path}, line 5: ")
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"question": "q", "answer": "no number"}\n', "without ####"),
        ('{"prompt": "q", "target": "#### 1"}\n', "no field 'question'"),
        ("not json\n", "cannot read .*: line 1"),
        ("[1, 2]\n", "line 1: not a JSON object"),
        ("", "no problems"),
    ],
)
def test_another_format_is_refused_with_the_reason(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(EvalError, match=says):
        load(path)


@pytest.mark.parametrize("name", ["absent.jsonl", "gsm8k", "."])
def test_a_dataset_that_is_not_there_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(EvalError, match="--dataset"):
        load(tmp_path / name)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's `openai/gsm8k` as its cache has it, each split of three problems, without a network."""
    repository, commit = tmp_path / "datasets--openai--gsm8k", "e53f048856ff4f594e959d75785d2c2d37b678ee"
    splits = repository / "snapshots" / commit / "main"
    splits.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    for split, first in (("test", 10), ("train", 20)):
        rows = [{"question": f"What is {n} + 0?", "answer": f"It is {n}.\n#### {n}"} for n in range(first, first + 3)]
        pq.write_table(pa.Table.from_pylist(rows), splits / f"{split}-00000-of-00001.parquet")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.mark.usefixtures("hub")
def test_of_the_hubs_dataset_the_test_split_is_asked_and_the_other_gives_examples() -> None:
    asked = load("openai/gsm8k", "--samples", "2")
    assert [problem.gold for problem in asked] == ["10", "11"]
    few_shot = load_few_shot(parse_args(["--dataset", "openai/gsm8k", "--few-shot", "2"]), set())
    assert [example.question for example in few_shot] == ["What is 20 + 0?", "What is 21 + 0?"]
