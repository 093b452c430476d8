"""The examples of docs/reading.md work as they stand, but for the store's path."""

from __future__ import annotations

import re
import shlex
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from made import make_results
from recorded import record, says

from deployments.activations.__main__ import main as activations
from deployments.activations.reader.loading import read_run
from deployments.activations.reader.sources import segments
from evals.labels.__main__ import main as labels

PAGE = Path(__file__).parents[2] / "docs" / "reading.md"
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
POINT = "layers.12.input_layernorm.output"
STORE, SESSION = "/data/activations", "first-steps"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The recorded session `first-steps` of eight answers, and their results in the working directory."""
    numbers, told = count(), says(tmp_path / "store", SESSION, POINT)
    results = tmp_path / "results" / SESSION
    results.parent.mkdir()
    make_results(
        results, 8, modes=("no-tools",), session_id=SESSION, activations=lambda _: told(f"run-{next(numbers)}")
    )
    record(tmp_path / "store", results, point=POINT, width=1024)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "store"


def run(command: str, store: Path) -> None:
    python, _, module, *args = shlex.split(command)
    assert python == "python"
    if module == "evals.labels":
        assert labels(args) == 0
    else:
        assert module == "deployments.activations"
        assert activations([args[0], "--dir", str(store), *args[1:]]) == 0


def check(code: str, store: Path) -> None:
    namespace: dict[str, Any] = {"__name__": "example"}
    exec(code.replace(STORE, str(store)), namespace)  # noqa: S102 - the page's own
    if "load(" in code:
        assert namespace["values"].shape[1] == 1024
    if "span.answer" in code:
        assert 1 <= len(namespace["values"]) <= 2
    if "optimizer" in code:
        assert {*namespace["targets"].tolist()} == {0.0, 1.0}
        assert namespace["loss"].isfinite()
    if "duckdb" in code:
        assert sorted(row[0] for row in namespace["first"]) == [False, True]


def test_the_examples_work_in_their_order(store: Path) -> None:
    for language, block in BLOCKS:
        assert language in ("sh", "python")
        if language == "python" and "ray_data" not in block:
            check(block, store)
        for command in block.splitlines() if language == "sh" else ():
            run(command, store)


def test_the_examples_with_ray_work(store: Path, cluster: Any) -> None:
    examples = [block for language, block in BLOCKS if language == "python" and "ray_data" in block]
    assert examples
    for block in examples:
        check(block, store)


def test_a_point_of_a_run_lies_over_a_map_of_its_file(store: Path) -> None:
    value = read_run(store / "_" / SESSION, "run-3", [POINT])[POINT]
    spans = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    mapped = [span[0].split("-") for span in spans if span[-1] == str(segments(store)[0])]
    assert any(int(low, 16) <= value.data_ptr() < int(high, 16) for low, high in mapped)
