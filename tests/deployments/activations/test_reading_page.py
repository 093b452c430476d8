"""The examples of docs/reading.md work as they stand, but for the store's path."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch

from deployments.activations.__main__ import main
from deployments.activations.catalogue import Catalogue
from deployments.activations.reader import load
from deployments.activations.selecting import shards
from deployments.activations.writer import Writer

PAGE = Path(__file__).parents[3] / "docs" / "reading.md"
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
POINT = "layers.12.input_layernorm.output"
STORE = "/data/activations"


@pytest.fixture
def store(make, tmp_path, monkeypatch):
    """The session `first-steps` of eight tagged runs, in the working directory."""
    writer = Writer(tmp_path, Catalogue())
    for i in range(8):
        points, tags = {POINT: torch.randn(40, 1024).bfloat16()}, {"correct": str(i % 2)}
        made = make(f"run-{i}", points, session_id="first-steps", tags=tags)
        writer.submit(made.facts, made.batches).result()
    writer.close()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def in_order():
    """Each command of the shell blocks, and each block of Python with the commands before it."""
    commands, found = [], []
    for language, block in BLOCKS:
        if language == "sh":
            commands += block.splitlines()
        else:
            found.append((block, list(commands)))
    return found


@pytest.mark.parametrize(("code", "commands"), in_order(), ids=lambda value: None)
def test_an_example_works(request, store, code, commands):
    if "ray" in code:
        request.getfixturevalue("cluster")
    for command in commands:
        python, _, module, name, *args = shlex.split(command)
        assert (python, module) == ("python", "deployments.activations")
        assert main([name, "--dir", str(store), *args]) == 0
    namespace = {"__name__": "example"}
    exec(code.replace(STORE, str(store)), namespace)  # noqa: S102 - the page's own
    if "load(" in code:
        assert namespace["values"].shape == (40, 1024)
    if "duckdb" in code:
        assert sorted(row[0] for row in namespace["first"]) == ["0", "1"]


def test_a_point_of_a_run_lies_over_a_map_of_its_file(store):
    value = load(store / "first-steps", "run-3", [POINT])[POINT]
    spans = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    mapped = [span[0].split("-") for span in spans if span[-1] == str(shards(store)[0])]
    assert any(int(low, 16) <= value.data_ptr() < int(high, 16) for low, high in mapped)
