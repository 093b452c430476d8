"""Worked examples: which file, which lines of it, and never a problem that is being asked."""

from collections.abc import Container
from pathlib import Path

from evals.config import HUB_DATASET, Config, EvalError
from evals.task.problems import locate, read_rows
from evals.task.prompts import Example

SHIPPED = Path(__file__).parents[1] / "few_shot.jsonl"


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
        path = locate(HUB_DATASET, "train") if config.dataset == HUB_DATASET else SHIPPED
        most = config.few_shot
    examples: dict[str, Example] = {}
    for problem, answer, _ in read_rows(path):
        if problem.id not in asked and len(examples) != most:
            examples.setdefault(problem.id, Example(problem.id, problem.question, answer))
    if len(examples) < (most or 1):
        many = f"only {len(examples)} examples that are not among the problems"
        raise EvalError(f"--few-shot {config.few_shot}: {path} has {many}")
    return [*examples.values()]
