"""Prompts: worked examples, a variant's prefix, the question and the instruction."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from deployments.demo_model import INSTRUCTION


class Example(NamedTuple):
    """A worked example as its file has it; the answer ends in `#### <number>`."""

    id: str
    question: str
    answer: str


class Prompts(NamedTuple):
    """All texts of an evaluation's prompts."""

    variants: dict[str, str]  # prefixes by name
    few_shot: Sequence[Example] = ()
    system: str = ""
    instruction: str = INSTRUCTION

    def messages(self, question: str, variant: str) -> list[dict[str, Any]]:
        """The messages before the model's first: each example is a user's and an assistant's, without prefix."""
        asked: list[dict[str, Any]] = [{"role": "system", "content": self.system}] if self.system else []
        for example in self.few_shot:
            asked.append({"role": "user", "content": example.question + self.instruction})
            asked.append({"role": "assistant", "content": example.answer})
        prefix = self.variants[variant]
        text = f"{prefix}\n\n{question}" if prefix else question
        return [*asked, {"role": "user", "content": text + self.instruction}]

    def record(self) -> dict[str, Any]:
        """The texts as config.json holds them."""
        return self._asdict() | {"few_shot": [example._asdict() for example in self.few_shot]}
