"""A task of inspect_ai whose first attempt ends in its second sample."""

import os
from pathlib import Path

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import match
from inspect_ai.solver import Generate, Solver, TaskState, generate, solver

TRIED = Path(os.environ["TRIED"])  # a file that the first attempt makes


@solver
def fails_once() -> Solver:
    async def solve(state: TaskState, generate: Generate) -> TaskState:
        if state.sample_id == "second" and not TRIED.exists():
            TRIED.touch()
            raise RuntimeError("the first attempt fails")
        return state

    return solve


@task
def sums() -> Task:
    problems = [Sample("What is 3 + 4?", target="7", id=name) for name in ("first", "second")]
    return Task(problems, solver=[fails_once(), generate()], scorer=match(numeric=True))
