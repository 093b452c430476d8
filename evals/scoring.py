"""GSM8K's scoring rules as pure functions.

- strict: the answer after `####`, as openai/grade-school-math `dataset.py` extracts it.
- flexible: the last number of the text, as lm-evaluation-harness `gsm8k` v3 `flexible-extract` does.

Both compare as lm-evaluation-harness does: as text, without commas, dollar signs and a trailing dot. So `$1,234.` is
1234, and `18.00` is not 18.
"""

import re
from collections.abc import Callable
from typing import Literal

Rule = Literal["strict", "flexible"]

STRICT = re.compile(r"#### (\-?[0-9\.\,]+)")
FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
DIGIT = re.compile(r"[0-9]")


def strict_match(text: str) -> str | None:
    """The first number after `#### `, without its commas; None where there is none."""
    match = STRICT.search(text)
    if match is None or not DIGIT.search(match.group(1)):
        return None
    return match.group(1).replace(",", "")


def flexible_match(text: str) -> str | None:
    """The last number of the text, as it stands there (`$1,234.`); None where there is none.

    By lm-evaluation-harness's rule: two or more dots, commas or dollar signs alone are one too, and score wrong.
    """
    matches = FLEXIBLE.findall(text)
    if not matches:
        return None
    money, plain = matches[-1]
    return str(money or plain).strip()


MATCHERS: dict[Rule, Callable[[str], str | None]] = {"strict": strict_match, "flexible": flexible_match}


def is_correct(completion: str, gold: str, rule: Rule = "strict") -> bool:
    """Whether the completion's answer by `rule` is that of `gold`.

    Args:
        completion: the model's text.
        gold: GSM8K's `answer` field, or the bare number.
        rule: `strict` or `flexible`.

    Raises:
        ValueError: `gold` holds no number, or there is no such rule.
    """
    if rule not in MATCHERS:
        raise ValueError(f"no scoring rule {rule!r}; there are {', '.join(MATCHERS)}")
    expected = _compared(strict_match(gold) or gold)
    if not re.fullmatch(r"-?[0-9.]*[0-9][0-9.]*", expected):
        raise ValueError(f"the gold answer has no number: {gold!r}")
    found = MATCHERS[rule](completion)
    return found is not None and _compared(found) == expected


def _compared(number: str) -> str:
    """What is left for the comparison."""
    return number.strip().replace(",", "").replace("$", "").removesuffix(".")
