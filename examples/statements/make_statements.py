"""Write statements.jsonl from the tables of facts beside this file: `python examples/statements/make_statements.py`."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path

HERE = Path(__file__).parent
# A topic's facts are in TOPIC.csv.
TEMPLATES = {
    "animals": "{subject} is {ending}",
    "countries": "{subject} is a country in {ending}",
    "opposites": "the opposite of {subject} is {ending}",
    "spanish": "the Spanish word for {subject} is {ending}",
}


def statements(topic: str) -> Iterator[dict[str, str | bool]]:
    """Give the statements of a topic: each line of its table is a group of two facts, each subject with each ending."""
    with (HERE / f"{topic}.csv").open(encoding="utf-8", newline="") as file:
        groups = list(csv.DictReader(file))
    for number, group in enumerate(groups, 1):
        facts = {group["subject"]: group["ending"], group["other_subject"]: group["other_ending"]}
        for place, (subject, ending) in enumerate(product(facts, facts.values()), 1):
            text = TEMPLATES[topic].format(subject=subject, ending=ending)
            yield {
                "id": f"{topic}-{number:02}-{place}",
                "text": text[0].upper() + text[1:],
                "label": ending == facts[subject],
                "group": f"{topic}-{number:02}",
                "topic": topic,
                "subject": subject,
                "ending": ending,
            }


def jsonl() -> str:
    """The statements of all topics, one JSON object a line."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for topic in TEMPLATES for row in statements(topic))


if __name__ == "__main__":
    (HERE / "statements.jsonl").write_text(jsonl(), encoding="utf-8")
