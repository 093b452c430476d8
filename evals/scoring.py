"""GSM8K's scoring rules as pure functions.

- strict: the answer after `####`, as openai/grade-school-math `dataset.py` extracts it.
- flexible: the last number of the text, as lm-evaluation-harness `gsm8k` v3 `flexible-extract` does.

Both return the matched text; numbers are compared as `Decimal`, so `1,234.00` equals `$1234`.
"""

import re
from collections.abc import Callable
from decimal import Decimal
from typing import Literal

Rule = Literal["strict", "flexible"]

STRICT = re.compile(r"#### (\-?[0-9\.\,]+)")
FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
NUMBER = re.compile(r"-?([0-9]+(\.[0-9]+)?|\.[0-9]+)")


def strict_match(text: str) -> str | None:
    """The first number after `#### `, without its commas; None where there is none."""
    match = STRICT.search(text)
    if match is None:
        return None
    found = match.group(1).replace(",", "")
    return found if to_number(found) is not None else None


def flexible_match(text: str) -> str | None:
    """The last number of the text, as it stands there (`$1,234.`); None where there is none."""
    matches = FLEXIBLE.findall(text)
    if not matches:
        return None
    money, plain = matches[-1]
    return str(money or plain).strip()


MATCHERS: dict[Rule, Callable[[str], str | None]] = {"strict": strict_match, "flexible": flexible_match}


def to_number(text: str) -> Decimal | None:
    """The value of `text` without commas, dollar signs and trailing dots; None if that is not a number."""
    bare = text.strip().replace(",", "").replace("$", "").rstrip(".")
    return Decimal(bare) if NUMBER.fullmatch(bare) else None


def is_correct(completion: str, gold: str, rule: Rule = "strict") -> bool:
    """Whether the completion's answer by `rule` has the value of `gold`.

    Args:
        completion: the model's text.
        gold: GSM8K's `answer` field, or the bare number.
        rule: `strict` or `flexible`.

    Raises:
        ValueError: `gold` holds no number, or there is no such rule.
    """
    if rule not in MATCHERS:
        raise ValueError(f"no scoring rule {rule!r}; there are {', '.join(MATCHERS)}")
    expected = to_number(strict_match(gold) or gold)
    if expected is None:
        raise ValueError(f"the gold answer has no number: {gold!r}")
    found = MATCHERS[rule](completion)
    return found is not None and to_number(found) == expected
