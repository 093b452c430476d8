"""Rewards: small named functions over a sample, each from 0 to 1, and their weighted sum.

    correctness   1 for the right number by the run's rule
    format        1 if the answer ends in its only `####` line, with a number
    efficiency    2^(-tokens / 256) for a right answer of so many new tokens, 0 for any other; refused where the
                  server counts none
    tool_use      the share of calls that gave a result; 0 without a call

A function of the user's is named by its import path, `package.module:function`.
"""

import importlib
import re
from collections.abc import Callable
from typing import NamedTuple

from evals.config import EvalError
from evals.scoring import strict_match
from evals.task.records import tool_calls
from evals.task.trajectory import UNREWARDED, Sample

HALVING = 256  # new tokens of all turns that halve the efficiency
LAST_LINE = re.compile(r"#### \-?[0-9.,]+\s*\Z")


class Reward(NamedTuple):
    """A function with the name and the weight that the config gives it."""

    name: str
    weight: float
    function: Callable[[Sample], float]


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


def load_rewards(weights: dict[str, float]) -> list[Reward]:
    """The functions that the config names.

    Args:
        weights: by one of the names above, or an import path.

    Raises:
        EvalError: there is no such function.
    """
    return [Reward(name, weight, SHIPPED.get(name) or _imported(name)) for name, weight in weights.items()]


class Rewarder:
    """Rewards samples one after another.

    If a function fails, samples stay without a reward, and the first failure of each function is reported.
    """

    def __init__(self, rewards: list[Reward], say: Callable[[str], None]) -> None:
        """Initializes without failures.

        Args:
            rewards: the functions.
            say: called with the first failure of each.
        """
        self._rewards = rewards
        self._say = say
        self._reported: set[str] = set()

    def __call__(self, sample: Sample) -> Sample:
        """The sample with its rewards and their weighted sum; without, where it or one of them failed."""
        if sample.outcome == "failed":
            return sample
        values = {reward.name: self._value(reward, sample) for reward in self._rewards}
        known = {name: value for name, value in values.items() if value is not None}
        if len(known) < len(values):
            return sample.model_copy(update=UNREWARDED)
        total = sum(reward.weight * known[reward.name] for reward in self._rewards)
        return sample.model_copy(update={"rewards": known, "reward": total})

    def _value(self, reward: Reward, sample: Sample) -> float | None:
        try:
            value = float(reward.function(sample))
            if 0.0 <= value <= 1.0:
                return value
            why = f"the reward {reward.name} is {value} for {sample.key}, not from 0 to 1"
        except Exception as error:  # noqa: BLE001 - whatever a user's function raises costs no answer
            why = f"the reward {reward.name} failed for {sample.key}: {type(error).__name__}: {error}"
        if reward.name not in self._reported:
            self._reported.add(reward.name)
            self._say(f"{why}; the answers are kept: repair the function or choose other --rewards, then use --resume")
        return None


def _imported(name: str) -> Callable[[Sample], float]:
    module, separator, attribute = name.partition(":")
    if not separator:
        raise EvalError(f"--rewards: no reward {name!r}; there are {', '.join(SHIPPED)}, or package.module:function")
    try:
        function: Callable[[Sample], float] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise EvalError(f"--rewards: {name} cannot be imported: {error}") from error
    if not callable(function):
        raise EvalError(f"--rewards: {name} is not a function")
    return function
