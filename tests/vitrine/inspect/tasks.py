"""Tasks of inspect_ai's own kinds: a tool loop in two epochs, a multiple choice, and a score without a model."""

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.model import ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import CORRECT, INCORRECT, Score, Scorer, Target, accuracy, choice, match, scorer
from inspect_ai.solver import TaskState, generate, multiple_choice, use_tools
from inspect_ai.tool import Tool, tool

from deployments.demo_model.calculator import calculate

QUESTION = "{} has {} boxes of {} pens. How many pens is that?\n\nSolve it step by step. End with #### and the answer."


@tool
def calculator() -> Tool:
    async def execute(expression: str) -> str:
        """Evaluates an arithmetic expression.

        Args:
            expression: for example (3 + 4) * 2.5
        """
        return calculate(expression)

    return execute


@task
def loop() -> Task:
    problem = Sample(QUESTION.format("Ann", 3, 12), target="36", id="pens")
    return Task([problem], solver=[use_tools(calculator()), generate()], scorer=match(numeric=True), epochs=2)


@task
def choices() -> Task:
    question = Sample("What is 2 + 2?", target="B", choices=["3", "4"])
    return Task([question], solver=multiple_choice(), scorer=choice())


@scorer(metrics=[accuracy()])
def few_boxes() -> Scorer:
    async def score(state: TaskState, target: Target) -> Score:
        said = ModelOutput(usage=ModelUsage())  # else it fetches a tokenizer to count
        grader = get_model("mockllm/model", memoize=False, custom_outputs=[said])
        await grader.generate("Few?")  # a call of another model
        return Score(value=CORRECT if target.text == "few" else INCORRECT)

    return score


@task
def sums() -> Task:
    """Half of the samples count as right whatever the model says, so that there are two classes to tell apart."""
    problems = [
        Sample(QUESTION.format(name, a, b), target="few" if a < 4 else "many", id=f"{name}-{a}-{b}")
        for name in ("Ann", "Tom")
        for a in (2, 3, 7, 8)
        for b in (3, 4)
    ]
    return Task(problems, solver=generate(), scorer=[few_boxes(), match(numeric=True)])
