import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parent))  # importlib mode adds no folder; the fake stands beside this file

from fake_openai import FakeServer

Write = Callable[..., Path]
Further = Callable[..., list[str]]


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as running:
        yield running


@pytest.fixture
def further(tmp_path: Path) -> Further:
    """`further(max_outage=0)`: the command's words for options that only a file gives."""

    def write(**options: Any) -> list[str]:
        path = tmp_path / "further.yaml"
        path.write_text(json.dumps(options))
        return ["--config", str(path)]

    return write


@pytest.fixture
def write_problems(tmp_path: Path) -> Write:
    """Writes a GSM8K file of sums; a label in brackets tells the fake server how to answer that one."""

    def write(*labels: str, name: str = "problems.jsonl") -> Path:
        rows = [
            {"question": f"{label} What is {i} + 1000?", "answer": f"It is {i + 1000}.\n#### {i + 1000:,}"}
            for i, label in enumerate(labels)
        ]
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write
