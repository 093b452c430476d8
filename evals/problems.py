"""Reading problems with Ray Data and choosing among them."""

import hashlib
import heapq
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError

from deployments.demo_model import PROBLEMS
from evals.config import HUB_DATASET, Config, EvalError
from evals.scoring import strict_match
from evals.trajectory import Problem

SCHEMA = pa.schema([(name, pa.string()) for name in Problem._fields])
BATCH = 1000  # problems


def load_problems(config: Config) -> pa.Table:
    """The problems of a run as rows of `Problem`: all, the first `samples`, or `samples` chosen by `seed`.

    The choice hangs on the seed and the problems alone, not on the file's order, and 20 of a seed are among
    its 50.

    Raises:
        EvalError: no such file, not GSM8K's format, or no problems.
    """
    path = locate(config.dataset, config.split)
    problems: Iterable[Problem] = read_problems(path)
    if config.seed is None:
        problems = islice(problems, config.samples)
    elif config.samples is None:
        problems = sorted(problems, key=lambda p: _rank(p, config.seed))
    else:
        problems = heapq.nsmallest(config.samples, problems, key=lambda p: _rank(p, config.seed))
    # Arrow, not a list: ten thousand problems are a few megabytes in one piece.
    rows, batches = (problem._asdict() for problem in problems), []
    while some := list(islice(rows, BATCH)):
        batches.append(pa.RecordBatch.from_pylist(some, SCHEMA))
    if not batches:
        raise EvalError(f"{path} has no problems")
    return pa.Table.from_batches(batches)


def locate(dataset: str, split: str, *, option: str = "--dataset") -> Path:
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
    if path.suffix not in {".jsonl", ".json", ".parquet"}:
        raise EvalError(f"{option} {dataset}: not demo, {HUB_DATASET}, or a .jsonl or .parquet file")
    if not path.is_file():
        raise EvalError(f"{option} {dataset}: no file {path}")
    return path


def read_problems(path: Path) -> Iterator[Problem]:
    """The problems of one file in its order; a repeated question is given once.

    Raises:
        EvalError: the file cannot be read, or a row is not GSM8K's.
    """
    seen: set[str] = set()
    for row in read_rows(path):
        problem = to_problem(row)
        if problem.id not in seen:
            seen.add(problem.id)
            yield problem


def read_rows(path: Path) -> Iterator[dict[str, str]]:
    """The questions and answers of one file in its order.

    Raises:
        EvalError: the file cannot be read, or a row has no such fields.
    """
    read = ray.data.read_parquet if path.suffix == ".parquet" else ray.data.read_json
    try:
        # None of a CPU: the model's replicas may hold them all.
        for row in read(str(path), override_num_blocks=1, num_cpus=0, label_selector=this_node()).iter_rows():
            yield {name: str(_field(row, name)) for name in ("question", "answer")}
    except (ray.exceptions.RayError, pa.ArrowInvalid) as error:
        raise EvalError(f"cannot read {path}: {str(error).strip().splitlines()[-1]}") from error


def to_problem(row: dict[str, str]) -> Problem:
    """A row of GSM8K's format as a problem.

    Raises:
        EvalError: the answer does not end in `#### <number>`.
    """
    gold = strict_match(row["answer"])
    if gold is None:
        raise EvalError(f"not GSM8K's format: an answer without #### and a number: {row['answer'][-80:]!r}")
    return Problem(question_id(row["question"]), row["question"], gold)


def question_id(question: str) -> str:
    """A problem's id, made of its question alone."""
    return hashlib.sha256(question.encode()).hexdigest()[:12]


def this_node() -> dict[str, str]:
    """Selects the driver's node: the one that has the file, and from which the base URL was meant."""
    return {"ray.io/node-id": ray.get_runtime_context().get_node_id()}


def _field(row: dict[str, Any], name: str) -> Any:
    if name not in row:
        raise EvalError(f"not GSM8K's format: a row has no field {name!r}, only {', '.join(row)}")
    return row[name]


def _rank(problem: Problem, seed: int | None) -> str:
    return hashlib.sha256(f"{seed}:{problem.id}".encode()).hexdigest()
