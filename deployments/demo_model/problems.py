"""Seeded generator of multi-step word problems in GSM8K's format, with true annotations and answers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from deployments.demo_model.draft import ProblemDraft, UnsuitableNumbers
from deployments.demo_model.stories import STORIES

HARD_SHARE = 0.2
"""Share of problems that hold a product too hard for a small model's head."""

HELD_OUT_SEED = 7_000_001
VALIDATION_SEED = 8_000_001
TRAIN_SEED = 1


@dataclass(frozen=True)
class Step:
    """One step of a solution.

    Attributes:
        text: A sentence with one `{}` where the expression stands, such as `Tom buys {} apples.`.
        expression: Plain arithmetic, such as `14*23`.
        value: The exact integer the expression evaluates to.
    """

    text: str
    expression: str
    value: int

    def solved(self) -> str:
        """The sentence with the result worked out: `Tom buys 14*23=322 apples.`."""
        return self.text.format(f"{self.expression}={self.value}")

    def annotated(self) -> str:
        """The sentence in GSM8K's form: `Tom buys 14*23=<<14*23=322>>322 apples.`."""
        return self.text.format(f"{self.expression}=<<{self.expression}={self.value}>>{self.value}")

    def planned(self) -> str:
        """The sentence with the expression alone, for a calculator to work out."""
        return self.text.format(self.expression)


@dataclass(frozen=True)
class Problem:
    """A word problem with two to five steps; the last step's value is the answer."""

    question: str
    steps: tuple[Step, ...]
    hard: bool

    @property
    def answer(self) -> int:
        """The final number."""
        return self.steps[-1].value

    def text_solution(self) -> str:
        """The solution a model writes without tools, closed by `#### N`."""
        return "\n".join([*(step.solved() for step in self.steps), f"#### {self.answer}"])

    def gsm8k(self) -> dict[str, str]:
        """The problem as one record of GSM8K's jsonl files."""
        solution = "\n".join([*(step.annotated() for step in self.steps), f"#### {self.answer}"])
        return {"question": self.question, "answer": solution}


def make_problem(rng: random.Random, hard_share: float = HARD_SHARE) -> Problem:
    """Draw one problem; whether it is hard is drawn first, so that the share is exact in expectation."""
    hard = rng.random() < hard_share
    while True:
        draft = ProblemDraft(rng, hard)
        try:
            rng.choice(STORIES)(draft)
        except UnsuitableNumbers:
            continue
        if draft.hard_left == 0 and 2 <= len(draft.lines) <= 5:
            return Problem(draft.question, tuple(Step(*line) for line in draft.lines), hard)


def stream(seed: int, excluded: frozenset[str] = frozenset(), hard_share: float = HARD_SHARE) -> Iterator[Problem]:
    """Endless distinct-seeded problems, leaving out those whose question is in `excluded`."""
    rng = random.Random(seed)
    while True:
        problem = make_problem(rng, hard_share)
        if problem.question not in excluded:
            yield problem


def held_out(count: int) -> list[Problem]:
    """The first `count` held-out problems, no question twice. The first 200 are the demo set."""
    chosen: dict[str, Problem] = {}
    for problem in stream(HELD_OUT_SEED):
        chosen.setdefault(problem.question, problem)
        if len(chosen) == count:
            break
    return list(chosen.values())
