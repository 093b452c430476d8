"""A word problem under construction: draws names and numbers, and collects the text and the steps."""

from __future__ import annotations

import random

from deployments.demo_model.calculator import work_out


def _words(text: str) -> list[str]:
    return text.split()


NAMES = _words(
    "Tom Anna Ben Clara David Emma Felix Grace Henry Ida Jack Kate Leo Maria Nora Oscar Paul Rosa Sam "
    "Tina Victor Wendy Omar Priya Yuki Carlos Lin Amir Zoe Hugo Mia Noah"
)

ITEMS = _words(
    "apples oranges pears lemons plums marbles stickers stamps coins books pencils pens cards beads "
    "shells cookies muffins candles buttons balloons roses tulips eggs bottles bricks tickets badges "
    "ribbons toys stones nails cups"
)

LARGEST = 99_999
"""No value in a problem is above this."""


class UnsuitableNumbers(Exception):
    """The drawn numbers do not suit the story; draw again."""


class ProblemDraft:
    """A question under construction together with its worked steps.

    Attributes:
        rng: The only source of chance.
        parts: The question's sentences so far.
        lines: The steps so far, each (sentence with one `{}`, expression, value).
        hard_left: How many hard products are still to be placed (0 or 1).
    """

    def __init__(self, rng: random.Random, hard: bool) -> None:
        """Begin an empty draft that must (or must not) hold one hard product."""
        self.rng = rng
        self.parts: list[str] = []
        self.lines: list[tuple[str, str, int]] = []
        self.hard = hard
        self.hard_left = int(hard)
        names = rng.sample(NAMES, 3)
        self.words = {"n": names[0], "m": names[1], "o": names[2], "item": rng.choice(ITEMS)}

    def say(self, *wordings: str, **values: object) -> None:
        """Add one of the wordings to the question, with names, item and `values` filled in."""
        self.parts.append(self.rng.choice(wordings).format(**self.words, **values))

    def work(self, sentence: str, expression: str, **values: object) -> int:
        """Add a step whose sentence holds `{e}` for the expression; returns the expression's value."""
        value = work_out(expression)
        if value.denominator != 1 or not 1 <= value <= LARGEST:
            raise UnsuitableNumbers
        text = sentence.format(e="{}", **self.words, **values)
        self.lines.append((text, expression, int(value)))
        return int(value)

    def product(self) -> tuple[int, int]:
        """Two factors: a hard pair if one is still to be placed, else one digit by at most two."""
        draw = self.rng.randint
        if self.hard_left:
            self.hard_left = 0
            pair = [draw(13, 98), draw(13, 98)] if draw(0, 1) else [draw(104, 989), draw(12, 79)]
        else:
            pair = [draw(2, 9), draw(3, 30)]
        self.rng.shuffle(pair)
        return pair[0], pair[1]

    def factor(self, value: int) -> int:
        """A factor to multiply `value` by, hard only if a hard product is still to be placed."""
        if self.hard_left and value >= 13:
            self.hard_left = 0
            return self.rng.randint(12, 79)
        if value > (2_000 if self.hard else 99):
            raise UnsuitableNumbers
        return self.rng.randint(2, 9)

    def amount(self) -> int:
        """A number to add or to begin with: mostly below 100, at times of three digits."""
        low, high = self.rng.choices([(2, 40), (20, 99), (100, 900)], [53, 35, 12])[0]
        return self.rng.randint(low, high)

    def below(self, value: int) -> int:
        """A number to take away from `value` so that something is left."""
        if value < 4:
            raise UnsuitableNumbers
        return min(self.amount(), self.rng.randint(2, value - 1))

    def divisor(self, value: int) -> int:
        """A divisor of `value` between 2 and 12 that leaves more than one share."""
        fitting = [k for k in range(2, 13) if value % k == 0 and value > k]
        if not fitting:
            raise UnsuitableNumbers
        return self.rng.choice(fitting)

    @property
    def question(self) -> str:
        """The whole question."""
        return " ".join(self.parts)
