"""Rewards: small named functions over a sample, each from 0 to 1, and their weighted sum.

    correctness   1 for the right number by the run's rule
    format        1 if the answer ends in its only `####` line, with a number
    efficiency    2^(-tokens / 256) for a right answer of so many new tokens, 0 for any other; refused where the
                  server counts none
    tool_use      the share of calls that gave a result; 0 without a call

A function of the user's is named by its import path, `package.module:function` or `package.module.function`.
"""

import pkgutil
import re
from collections.abc import Callable

from evals.config import EvalError
from evals.scoring import strict_match
from evals.task.records import tool_calls
from evals.task.trajectory import Sample

Reward = Callable[[Sample], Sample]
HALVING = 256  # new tokens of all turns that halve the efficiency
LAST_LINE = re.compile(r"#### \-?[0-9.,]+\s*\Z")


def correctness(sample: Sample) -> float:
    """1 for the right number by the run's rule, else 0."""
    return float(bool(sample.correct))


def format(sample: Sample) -> float:  # the name that configs use
    """1 if the answer ends in its only `####`, with a number after it, else 0."""
    text = sample.completion or ""
    ends = text.count("####") == 1 and LAST_LINE.search(text) and strict_match(text)
    return float(bool(ends))


def efficiency(sample: Sample) -> float:
    """Of a right answer 2^(-tokens / 256), so that 256 more tokens halve it; 0 of any other.

    Raises:
        ValueError: the server counts no tokens; each right answer would get 1.
    """
    if not sample.correct:
        return 0.0
    if not sample.completion_tokens:
        raise ValueError("the server's answers have no usage.completion_tokens; efficiency cannot be computed")
    return float(2 ** (-sample.completion_tokens / HALVING))


def tool_use(sample: Sample) -> float:
    """The share of the sample's tool calls that gave a result and no error; 0 without a call."""
    calls = tool_calls(sample)
    good = sum(call["result"] is not None and not call["error"] for call in calls)
    return good / len(calls) if calls else 0.0


SHIPPED: dict[str, Callable[[Sample], float]] = {
    "correctness": correctness,
    "format": format,
    "efficiency": efficiency,
    "tool_use": tool_use,
}


def load_rewards(weights: dict[str, float]) -> Reward:
    """What gives samples their rewards and the weighted sum of these.

    Args:
        weights: by one of the names above, or an import path.

    Returns:
        A function from a sample to one with `rewards` and `reward`; one that failed stays as it is. It raises EvalError
        where a reward raises an exception, or is not from 0 to 1.

    Raises:
        EvalError: there is no such function.
    """
    functions = {name: SHIPPED.get(name) or _imported(name) for name in weights}

    def reward(sample: Sample) -> Sample:
        if sample.outcome == "failed":
            return sample
        values = {name: _value(name, function, sample) for name, function in functions.items()}
        total = sum(weights[name] * value for name, value in values.items())
        return sample.model_copy(update={"rewards": values, "reward": total})

    return reward


def _value(name: str, function: Callable[[Sample], float], sample: Sample) -> float:
    try:
        value = float(function(sample))
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"{value} is not from 0 to 1")
    except Exception as error:  # whatever a user's function raises
        why = f"the reward {name} failed for {sample.key}: {type(error).__name__}: {error}"
        raise EvalError(f"{why}; repair it or choose other rewards, then use --resume") from error
    return value


def _imported(name: str) -> Callable[[Sample], float]:
    try:
        function: Callable[[Sample], float] = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise EvalError(f"rewards: {name} is none of {', '.join(SHIPPED)}, nor can it be imported: {error}") from error
    if not callable(function):
        raise EvalError(f"rewards: {name} is not a function")
    return function
