"""Worked examples: which file, which lines of it, and never a problem that is being asked."""

from collections.abc import Container
from pathlib import Path

from evals.config import HUB_DATASET, Config, EvalError
from evals.task.problems import locate, read_rows
from evals.task.prompts import Example, FewShot

SHIPPED = Path(__file__).parents[1] / "few_shot.jsonl"


def load_few_shot(config: Config, asked: Container[str]) -> FewShot | None:
    """The examples of a run: the first of their file, in its order, that are not among the problems.

    Args:
        config: how many, and of which file.
        asked: ids of the problems of the run.

    Raises:
        EvalError: no such file, another format, or too few examples in it.
    """
    if not config.few_shot:
        return None
    path, source = examples_file(config)
    examples: dict[str, Example] = {}
    for problem, answer, _ in read_rows(path):
        if problem.id in asked or problem.id in examples:
            continue
        examples[problem.id] = Example(problem.id, problem.question, answer)
        if len(examples) == config.few_shot:
            return FewShot(source, tuple(examples.values()))
    raise EvalError(
        f"--few-shot {config.few_shot}: {path} has only {len(examples)} examples that are not among the problems",
    )


def examples_file(config: Config) -> tuple[Path, str]:
    """The file of the examples, and what it is called in config.json.

    `--few-shot-file`; else the train split of the dataset (of a file `test.jsonl`, the `train.jsonl` beside it);
    else the examples that ship.
    """
    if config.few_shot_file:
        path = locate(str(config.few_shot_file), "test", option="--few-shot-file")
        return path, str(path)
    if config.dataset == HUB_DATASET:
        return locate(HUB_DATASET, "train"), f"{HUB_DATASET}, split train"
    if config.dataset != "demo":
        test = locate(config.dataset, config.split)
        train = test.with_stem("train")
        if test.stem == "test" and train.is_file():
            return train, str(train)
    return SHIPPED, f"evals/{SHIPPED.name}"
