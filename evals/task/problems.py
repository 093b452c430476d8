"""Reading problems and choosing among them, and worked examples."""

import hashlib
import heapq
import json
from collections.abc import Container, Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError

from deployments.demo_model import PROBLEMS
from evals.config import HUB_DATASET, Config, EvalError
from evals.scoring import gold_number, strict_match
from evals.task.prompts import Example
from evals.task.trajectory import Problem

SCHEMA = pa.schema([(name, pa.string()) for name in Problem._fields])
BATCH = 1000  # problems
EXAMPLES = Path(__file__).parents[1] / "few_shot.jsonl"


class ProblemRow(NamedTuple):
    """A row of a file in GSM8K's format: the problem, the whole answer that its gold ends, and `line 7` or `row 7`."""

    problem: Problem
    answer: str
    place: str


def load_problems(config: Config) -> pa.Table:
    """The problems of an evaluation, rows of `Problem`: all, the first `samples`, or `samples` chosen by `seed`.

    The choice hangs on the seed and the problems alone, not on the file's order, and 20 of a seed are among
    its 50.

    Raises:
        EvalError: no such file, not GSM8K's format, or no problems.
    """
    path = locate(config.dataset)
    problems: Iterable[Problem] = _distinct(path)
    if config.seed is None:
        problems = islice(problems, config.samples)
    elif config.samples is None:
        problems = sorted(problems, key=lambda p: rank(p.id, config.seed))
    else:
        problems = heapq.nsmallest(config.samples, problems, key=lambda p: rank(p.id, config.seed))
    table = pa.Table.from_pylist([problem._asdict() for problem in problems], SCHEMA)
    if not table.num_rows:
        raise EvalError(f"{path} has no problems")
    return table


def load_few_shot(config: Config, asked: Container[str]) -> list[Example]:
    """The examples of an evaluation, in their file's order, without those that are among the problems.

    All of the file that `few_shot` names; else as many as it says, of the train split of `openai/gsm8k` with that
    dataset, or of the examples that ship.

    Args:
        config: how many, or of which file.
        asked: ids of the problems.

    Raises:
        EvalError: no such file, another format, or too few examples in it.
    """
    if not config.few_shot:
        return []
    if isinstance(config.few_shot, str):
        path, most = locate(config.few_shot, option="--few-shot"), None
    else:
        path = locate(HUB_DATASET, "train") if config.dataset == HUB_DATASET else EXAMPLES
        most = config.few_shot
    examples: dict[str, Example] = {}
    for problem, answer, _ in read_rows(path):
        if problem.id not in asked and len(examples) != most:
            examples.setdefault(problem.id, Example(problem.id, problem.question, answer))
    if len(examples) < (most or 1):
        many = f"only {len(examples)} examples that are not among the problems"
        raise EvalError(f"--few-shot {config.few_shot}: {path} has {many}")
    return [*examples.values()]


def locate(dataset: str, split: str = "test", *, option: str = "--dataset") -> Path:
    """The local file of a dataset, fetched from the hub if it is `openai/gsm8k`.

    Raises:
        EvalError: there is none; the text begins with `option`.
    """
    if dataset == HUB_DATASET:
        name = f"main/{split}-00000-of-00001.parquet"
        try:
            return Path(hf_hub_download(HUB_DATASET, name, repo_type="dataset"))
        except (HfHubHTTPError, OSError) as error:
            raise EvalError(f"cannot fetch {HUB_DATASET} split {split}: {error}") from error
    path = PROBLEMS if dataset == "demo" else Path(dataset).expanduser().absolute()
    if path.suffix not in {".jsonl", ".parquet"}:
        raise EvalError(f"{option} {dataset}: not demo, {HUB_DATASET}, or a .jsonl or .parquet file")
    if not path.is_file():
        raise EvalError(f"{option} {dataset}: no file {path}")
    return path


def _distinct(path: Path) -> Iterator[Problem]:
    """The problems of a file in its order, each question once.

    Raises:
        EvalError: the file cannot be read, a row is not GSM8K's, or a question comes with two answers.
    """
    seen: dict[str, tuple[str, str]] = {}
    for problem, _, place in read_rows(path):
        gold, before = seen.setdefault(problem.id, (problem.gold, place))
        if gold != problem.gold:
            both = f"{problem.gold} and {gold}"
            raise EvalError(f"{path}, {place}: the question of {before}, with another answer: {both}")
        if before == place:
            yield problem


def read_rows(path: Path) -> Iterator[ProblemRow]:
    """The rows of one file in its order.

    Raises:
        EvalError: the file cannot be read, or a row is not GSM8K's.
    """
    try:
        for place, row in _parquet(path) if path.suffix == ".parquet" else json_lines(path):
            try:
                problem = to_problem(row)
            except EvalError as error:
                raise EvalError(f"{path}, {place}: {error}") from error
            yield ProblemRow(problem, row["answer"], place)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise EvalError(f"cannot read {path}: {error}") from error


def _parquet(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with pq.ParquetFile(path) as file:
        rows = chain.from_iterable(batch.to_pylist() for batch in file.iter_batches(BATCH))
        yield from ((f"row {number}", row) for number, row in enumerate(rows, 1))


def json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a file of JSON lines, each with its place, as `line 7`; blank lines are none.

    Raises:
        ValueError: a line holds none.
        OSError: the file cannot be read.
    """
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    row = json.loads(line)
                except json.JSONDecodeError as error:
                    raise ValueError(f"line {number}: {error.msg}") from error
                if not isinstance(row, dict):
                    raise ValueError(f"line {number}: not a JSON object")
                yield f"line {number}", row


def to_problem(row: dict[str, Any]) -> Problem:
    """A row of GSM8K's format as a problem.

    Raises:
        EvalError: it has no question, or no answer that ends in `#### <number>`.
    """
    question, answer = (_text(row, name) for name in ("question", "answer"))
    gold = strict_match(answer) or ""
    try:
        gold_number(gold)
    except ValueError:
        raise EvalError(f"not GSM8K's format: an answer without #### and a number: {answer[-80:]!r}") from None
    return Problem(question_id(question), question, gold)


def question_id(question: str) -> str:
    """A problem's id, made of its question alone."""
    return hashlib.sha256(question.encode()).hexdigest()[:12]


def _text(row: dict[str, Any], name: str) -> str:
    if name not in row:
        raise EvalError(f"not GSM8K's format: a row has no field {name!r}, only {', '.join(row)}")
    if not isinstance(row[name], str) or not row[name].strip():
        raise EvalError(f"not GSM8K's format: the {name} is {row[name]!r}, not a text")
    return str(row[name])


def rank(name: str, seed: int | None) -> str:
    """What names are drawn by: those of the least ranks, whatever their order."""
    return hashlib.sha256(f"{seed}:{name}".encode()).hexdigest()
