r"""GSM8K's scoring rules as pure functions: where a text's answer stands, and whether it is the right number.

- strict: the number after the first `#### `, as openai/grade-school-math `dataset.py` extracts it.
- flexible: the last number of the answer, as lm-evaluation-harness `gsm8k` v3 `flexible-extract` does.
- normalized: the last number of the answer that stands after `####` or in `\boxed{}`, however it is written.

The answer ends where a model goes on with a problem of its own, at which lm-evaluation-harness stops generating.

strict and flexible compare as lm-evaluation-harness does: as text, without commas, dollar signs and a trailing dot. So
`$1,234.` is 1234, and `18.00` is not 18. normalized compares as numbers.
"""

import re
from collections.abc import Callable
from decimal import Decimal
from typing import Literal, NamedTuple, get_args

Rule = Literal["strict", "flexible", "normalized"]

STRICT = re.compile(r"#### (\-?[0-9\.\,]+)")
FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
DIGIT = re.compile(r"[0-9]")
GOLD = re.compile(r"-?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)")
# What may stand between #### and the number, and between its sign and its digits. Possessive (`*+`), so that no text
# takes longer than its length.
CURRENCY = r"(?:\\?[$€£¥₹])"
NUMBER_PREFIX = rf"(?:[\s*_`~:=(\[{{]|{CURRENCY}|\\[(\[]|\\(?:text|math)\w*+|(?:the|final|answer|is)\b)*+"
NUMBER = r"[0-9]++(?:(?:,(?:\\!)?|\{,\}|\\,)[0-9]++)*+(?:\.[0-9]++)?+|\.[0-9]++"
# No fraction, range, time, equation or longer number: none of these is the number that they begin with.
OPERATOR = r"(?:[-+*/^=×÷·:−–x]|\\(?:times|cdot|div)\b)"
NUMBER_END = rf"(?![.,]?[0-9])(?![ \t]*{OPERATOR}[ \t]*[$0-9])(?![ \u00a0\u2009\u202f][0-9]{{3}}\b)"
ITEM = r"(?<=\n)[0-9]+\.[ \t]+\S"  # of a list below ####
NORMALIZED = re.compile(
    rf"(?:####|\\boxed\s*+\{{){NUMBER_PREFIX}(?!{ITEM})(?P<number>(?P<sign>[-−])?{CURRENCY}?+(?P<digits>{NUMBER})){NUMBER_END}",
    re.IGNORECASE,
)
SEPARATOR = re.compile(r"[^0-9.]")
# At a line's start; before the first number it is the question that was asked, repeated.
NEW_PROBLEM = re.compile(r"^[ \t]*+(?:Question|Problem|Q)[ \t]*+[0-9]*+[ \t]*+:", re.MULTILINE)


class Answer(NamedTuple):
    """A number that a rule finds in a text.

    Attributes:
        text: What is compared.
        start: Its first character in the text.
        end: Behind its last character.
    """

    text: str
    start: int
    end: int


def answer_end(text: str) -> int:
    """Where the answer ends: at a line that begins a new problem (`Question:`, `Problem 2:`, `Q:`), else with the text.

    Before the first number such a line repeats the question, and ends nothing.
    """
    number = DIGIT.search(text)
    following = NEW_PROBLEM.search(text, number.start()) if number else None
    return following.start() if following else len(text)


def find_strict(text: str) -> Answer | None:
    """The first number after `#### `, without its commas; None where there is none."""
    match = STRICT.search(text)
    if match is None or not DIGIT.search(match[1]):
        return None
    return Answer(match[1].replace(",", ""), *match.span(1))


def find_flexible(text: str) -> Answer | None:
    """The last number of the answer, as it stands there (`$1,234.`); None where there is none.

    By lm-evaluation-harness's rule: two or more dots, commas or dollar signs alone are one too, and score wrong.
    """
    last = None
    for match in FLEXIBLE.finditer(text, 0, answer_end(text)):
        last = match
    return Answer(last[0], *last.span()) if last else None


def find_normalized(text: str) -> Answer | None:
    r"""The answer's last number after `####` or in `\boxed{}`, in plain digits (`-1234.5`); None without one.

    Before the number there may be spaces and line ends, the signs `* _ ` ~ : = ( [ {` and those of currencies, LaTeX's
    `\(`, `\[`, `\$`, `\text..` and `\math..`, and the words "the final answer is". The number may have commas between
    its digits, also as LaTeX writes them, and a decimal part. Units may follow. What an operator or a colon joins to
    another number (`1/2`, `3 * 4`, `5 x 3`, `18-20`, `18:30`), digits set apart by spaces (`10 000`), and a list below
    `####` are no answers.
    """
    last = None
    for match in NORMALIZED.finditer(text, 0, answer_end(text)):
        last = match
    if last is None:
        return None
    return Answer(("-" if last["sign"] else "") + SEPARATOR.sub("", last["digits"]), *last.span("number"))


def _compared(number: str) -> str:
    """What is left for the comparison as text."""
    return number.strip().replace(",", "").replace("$", "").removesuffix(".")


class Scoring(NamedTuple):
    """A rule: how it finds an answer, and the value of what it found: that of the gold number where it is right."""

    find: Callable[[str], Answer | None]
    value: Callable[[str], str | Decimal]


SCORING: dict[Rule, Scoring] = {
    "strict": Scoring(find_strict, _compared),
    "flexible": Scoring(find_flexible, _compared),
    "normalized": Scoring(find_normalized, Decimal),
}
RULES: tuple[Rule, ...] = get_args(Rule)


class Score(NamedTuple):
    """A text by one rule: the answer that it finds, if any, and whether that is the gold number."""

    answer: Answer | None
    correct: bool


def score(completion: str, gold: str, rule: Rule) -> Score:
    """A completion by a rule.

    Args:
        completion: the model's text.
        gold: GSM8K's `answer` field, or the bare number.
        rule: one of `RULES`.

    Raises:
        ValueError: `gold` holds no number, or there is no such rule.
    """
    if rule not in SCORING:
        raise ValueError(f"there is no scoring rule {rule!r}; the rules are {', '.join(RULES)}")
    expected = gold_number(gold)
    find, value = SCORING[rule]
    answer = find(completion)
    return Score(answer, answer is not None and value(answer.text) == value(expected))


def gold_number(gold: str) -> str:
    """The number of GSM8K's `answer` field, or of a bare number, in plain digits.

    Raises:
        ValueError: it holds none.
    """
    expected = _compared(strict_match(gold) or gold)
    if not GOLD.fullmatch(expected):
        raise ValueError(f"the gold answer has no number: {gold!r}")
    return expected


def is_correct(completion: str, gold: str, rule: Rule = "strict") -> bool:
    """Whether the completion's answer by a rule is the gold number; arguments and errors are those of `score`."""
    return score(completion, gold, rule).correct


def strict_match(text: str) -> str | None:
    """The answer by the strict rule, without its commas; None where there is none."""
    return answer.text if (answer := find_strict(text)) else None


def flexible_match(text: str) -> str | None:
    """The answer by the flexible rule, as it stands in the text; None where there is none."""
    return answer.text if (answer := find_flexible(text)) else None
