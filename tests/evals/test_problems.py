import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from evals.config import EvalError
from evals.options import parse_args
from evals.problems import load_problems
from evals.trajectory import Problem

Write = Callable[..., Path]

pytestmark = [
    pytest.mark.usefixtures("cluster"),
    # Ray Data's context warns of its own fields.
]


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


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"question": "q", "answer": "no number"}\n', "without ####"),
        ('{"prompt": "q", "target": "#### 1"}\n', "no field 'question'"),
        ("not json\n", "cannot read"),
        ("", "no problems|cannot read"),
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
