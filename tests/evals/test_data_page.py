"""The examples of docs/data.md work as they stand, but for the paths and the address."""

from __future__ import annotations

import re
import shlex
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
from made import make_results
from recorded import record, says

from deployments.activations.__main__ import main as activations
from deployments.activations.reader.loading import read_run
from deployments.activations.reader.sources import segments
from evals.labels.__main__ import main as labels
from tests.conftest import Served

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
BEFORE, OF_SERVER, AFTER = re.split(r"(^## Download.*?)(?=^## )", PAGE, flags=re.DOTALL | re.MULTILINE)
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


def blocks(text: str) -> list[tuple[str, str]]:
    """Each block of commands or code, with its language."""
    found = re.findall(r"^```(\w+)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert {language for language, _ in found} <= {"sh", "python", "text"}
    return [(language, code) for language, code in found if language != "text"]


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
    for language, block in blocks(BEFORE + AFTER):
        if language == "python" and "ray_data" not in block:
            check(block, store)
        for command in block.splitlines() if language == "sh" else ():
            run(command, store)


def test_the_examples_with_ray_work(store: Path, cluster: Any) -> None:
    examples = [block for language, block in blocks(PAGE) if language == "python" and "ray_data" in block]
    assert examples
    for block in examples:
        check(block, store)


def test_a_session_is_pulled_from_a_server(served: Served, tmp_path: Path) -> None:
    fields = {"model": "vitrine-demo", "session_id": SESSION, "capture": {"points": ["layers.1.output"]}}
    asked = httpx.post(f"{served.base_url}/completions", json=fields | {"prompt": "Ann has"}, timeout=60)
    [of] = asked.raise_for_status().json()["activations_meta"]["runs"]
    [(language, block)] = blocks(OF_SERVER)
    assert language == "sh"
    try:
        run(block.replace("http://gpu-box:8000", served.root), tmp_path)
    finally:
        httpx.delete(f"{served.base_url}/activations/session/{SESSION}", timeout=60).raise_for_status()
    assert read_run(tmp_path / "_" / SESSION).facts.run_id == of["run_id"]


def test_a_point_of_a_run_lies_over_a_map_of_its_file(store: Path) -> None:
    value = read_run(store / "_" / SESSION, "run-3", [POINT])[POINT]
    spans = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    mapped = [span[0].split("-") for span in spans if span[-1] == str(segments(store)[0])]
    assert any(int(low, 16) <= value.data_ptr() < int(high, 16) for low, high in mapped)
