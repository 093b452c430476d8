"""Prompts: worked examples, a variant's prefix, the question and the instruction."""

from pathlib import Path
from typing import Any, NamedTuple

import yaml

from deployments.demo_model import INSTRUCTION
from evals.config import CONTROL, EvalError

VARIANTS = Path(__file__).parents[1] / "variants.yaml"


class Example(NamedTuple):
    """A worked example as its file has it; the answer ends in `#### <number>`."""

    id: str
    question: str
    answer: str


class FewShot(NamedTuple):
    """Examples in the order in which they are shown, and where they come from."""

    source: str
    examples: tuple[Example, ...]


class Prompts(NamedTuple):
    """All texts of a run's prompts."""

    variants: dict[str, str]  # prefixes by name
    few_shot: FewShot | None
    instruction: str = INSTRUCTION
    system: str = ""
    tools: str = ""  # after the instruction of prompts with tools, where these are explained in text

    def messages(self, question: str, variant: str) -> list[dict[str, Any]]:
        """The messages before the model's first: each example is a user's and an assistant's, without prefix."""
        asked: list[dict[str, Any]] = [{"role": "system", "content": self.system}] if self.system else []
        for example in self.few_shot.examples if self.few_shot else ():
            asked.append({"role": "user", "content": example.question + self.instruction})
            asked.append({"role": "assistant", "content": example.answer})
        prefix = self.variants[variant]
        text = f"{prefix}\n\n{question}" if prefix else question
        return [*asked, {"role": "user", "content": text + self.instruction}]

    def record(self) -> dict[str, Any]:
        """The texts as config.json holds them."""
        few_shot = self.few_shot
        examples = [example._asdict() for example in few_shot.examples] if few_shot else []
        shown = few_shot and {"source": few_shot.source, "examples": examples}
        shown_texts = {"instruction": self.instruction, "variants": self.variants, "few_shot": shown}
        further = {"system": self.system, "tools": self.tools}
        return shown_texts | {name: text for name, text in further.items() if text}


def load_variants(names: tuple[str, ...], path: Path | None) -> dict[str, str]:
    """The prefixes of the variants named, in that order.

    Args:
        names: as in the file; `control` needs no line there.
        path: a YAML map of texts by name; without it the one that ships.

    Raises:
        EvalError: no such file, another format, or no such variant.
    """
    path = (path or VARIANTS).expanduser()
    try:
        texts = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise EvalError(f"--variants-file {path}: {error}") from error
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
        raise EvalError(f"--variants-file {path}: not a map of texts by name")
    texts = {CONTROL: ""} | {str(name): text.strip() for name, text in texts.items()}
    if texts[CONTROL]:
        raise EvalError(f"--variants-file {path}: {CONTROL} has a text; it must be empty")
    if unknown := [name for name in names if name not in texts]:
        raise EvalError(f"--variants: {path} has no {', '.join(unknown)}, only {', '.join(texts)}")
    return {name: texts[name] for name in names}
