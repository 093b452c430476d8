"""Conversations made of problems: the same problem solved without and with calculator calls."""

from __future__ import annotations

import random
from typing import Any

from deployments.demo_model.problems import Problem

Message = dict[str, Any]

INSTRUCTION = "\n\nSolve it step by step. End with #### and the answer."
"""What the evaluator appends to every question."""

SUFFIXES = (
    "\n\nThink step by step.",
    "\nWrite the final answer after ####.",
    " Please explain your steps.",
    "\n\nShow your work and give the final number.",
    " What is the answer?",
    " Thank you!",
)

MOODS = (
    "I am so frustrated, nothing works today.",
    "Take your time, we can do this together.",
    "Hurry up, I need this now.",
    "I am really happy today!",
    "This is the last try, do not fail again.",
    "You are doing great, I trust you.",
    "I am tired and sad, please help me.",
    "Hello! Can you help me with this problem?",
    "My teacher says this one is hard.",
    "I am afraid I will fail my test.",
)

SYSTEMS = (
    "You are a helpful assistant.",
    "You are a careful math tutor.",
    "Solve the problem step by step.",
    "Be brief and calm.",
)


def dress(question: str, rng: random.Random) -> str:
    """The question as a user may send it: often with `INSTRUCTION`, at times with a mood before it."""
    chance = rng.random()
    suffix = INSTRUCTION if chance < 0.5 else rng.choice(SUFFIXES) if chance < 0.7 else ""
    mood = rng.choice(MOODS) + rng.choice((" ", "\n", "\n\n")) if rng.random() < 0.2 else ""
    return mood + question + suffix


def tool_turns(problem: Problem) -> list[Message]:
    """The assistant's and the calculator's turns that solve a problem, one call a step."""
    turns: list[Message] = []
    for step in problem.steps:
        arguments = {"expression": step.expression}
        call = {"type": "function", "function": {"name": "calculator", "arguments": arguments}}
        turns.append({"role": "assistant", "content": step.planned(), "tool_calls": [call]})
        turns.append({"role": "tool", "content": str(step.value)})
    return [*turns, {"role": "assistant", "content": f"#### {problem.answer}"}]


def conversation(problem: Problem, tools: bool, rng: random.Random) -> list[Message]:
    """A whole training conversation, with or without calculator calls."""
    messages: list[Message] = [{"role": "user", "content": dress(problem.question, rng)}]
    if rng.random() < 0.1:
        messages.insert(0, {"role": "system", "content": rng.choice(SYSTEMS)})
    if tools:
        return messages + tool_turns(problem)
    return [*messages, {"role": "assistant", "content": problem.text_solution()}]
