"""Reading problems with Ray Data and choosing among them."""

import hashlib
import heapq
from collections.abc import Iterator
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


def load_problems(config: Config) -> list[Problem]:
    """The problems of a run: all, the first `samples`, or `samples` chosen by `seed`.

    The choice hangs on the seed and the problems alone, not on the file's order, and 20 of a seed are among
    its 50.

    Raises:
        EvalError: no such file, not GSM8K's format, or no problems.
    """
    path = locate(config.dataset, config.split)
    problems = read_problems(path)
    if config.seed is None:
        chosen = list(islice(problems, config.samples))
    elif config.samples is None:
        chosen = sorted(problems, key=lambda p: _rank(p, config.seed))
    else:
        chosen = heapq.nsmallest(config.samples, problems, key=lambda p: _rank(p, config.seed))
    if not chosen:
        raise EvalError(f"{path} has no problems")
    return chosen


def locate(dataset: str, split: str) -> Path:
    """The local file of a dataset, fetched from the hub if it is `openai/gsm8k`.

    Raises:
        EvalError: there is none.
    """
    if dataset == HUB_DATASET:
        name = f"main/{split}-00000-of-00001.parquet"
        try:
            return Path(hf_hub_download(HUB_DATASET, name, repo_type="dataset"))
        except (HfHubHTTPError, OSError) as error:
            raise EvalError(f"cannot fetch {HUB_DATASET} split {split}: {error}") from error
    path = PROBLEMS if dataset == "demo" else Path(dataset).expanduser().absolute()
    if path.suffix not in {".jsonl", ".json", ".parquet"}:
        raise EvalError(f"--dataset {dataset}: not demo, {HUB_DATASET}, or a .jsonl or .parquet file")
    if not path.is_file():
        raise EvalError(f"--dataset {dataset}: no file {path}")
    return path


def read_problems(path: Path) -> Iterator[Problem]:
    """The problems of one file in its order; a repeated question is given once.

    Raises:
        EvalError: the file cannot be read, or a row is not GSM8K's.
    """
    seen: set[str] = set()
    read = ray.data.read_parquet if path.suffix == ".parquet" else ray.data.read_json
    try:
        # None of a CPU: the model's replicas may hold them all.
        for row in read(str(path), override_num_blocks=1, num_cpus=0, label_selector=this_node()).iter_rows():
            problem = to_problem(row)
            if problem.id not in seen:
                seen.add(problem.id)
                yield problem
    except (ray.exceptions.RayError, pa.ArrowInvalid) as error:
        raise EvalError(f"cannot read {path}: {str(error).strip().splitlines()[-1]}") from error


def to_problem(row: dict[str, Any]) -> Problem:
    """A row of GSM8K's format as a problem; its id is made of the question alone.

    Raises:
        EvalError: a field is missing, or the answer does not end in `#### <number>`.
    """
    try:
        question, answer = str(row["question"]), str(row["answer"])
    except KeyError as error:
        raise EvalError(f"not GSM8K's format: a row has no field {error}, only {', '.join(row)}") from error
    gold = strict_match(answer)
    if gold is None:
        raise EvalError(f"not GSM8K's format: an answer without #### and a number: {answer[-80:]!r}")
    return Problem(hashlib.sha256(question.encode()).hexdigest()[:12], question, gold)


def this_node() -> dict[str, str]:
    """Selects the driver's node: the one that has the file, and from which the base URL was meant."""
    return {"ray.io/node-id": ray.get_runtime_context().get_node_id()}


def _rank(problem: Problem, seed: int | None) -> str:
    return hashlib.sha256(f"{seed}:{problem.id}".encode()).hexdigest()
