"""The tutorial's notebook runs from its first cell to its last, on a quarter of its statements."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
import pytest

from tests.conftest import ROOT, Served
from tests.examples.notebooks import cells, run

STATEMENTS = "examples/statements/statements.jsonl"
ELSEWHERE = {
    "%cd -q ..": "the test's directory",
    "%%bash\nmake smollm2": "the fixture `smollm2`",
    "%%bash --bg\nserve run": "the server of the other tests, which loads the model",
}


# The shipped model has 6 layers, and takes seconds where SmolLM2 takes minutes.
SHIPPED = {
    "--model smollm2": "--model vitrine-demo",
    'model="smollm2"': 'model="vitrine-demo"',
    "/v1/models/smollm2": "/v1/models/vitrine-demo",
    "layers.11.output": "layers.1.output",
    "layers.10.output": "layers.0.output",
    "layers.12.output": "layers.5.output",  # the last: no probe lies behind it
}
INSTALL = "deployments.readouts add results/truth/label.safetensors --name is-true"


@pytest.mark.long  # four engines and as many reports; each command of it has tests of its own
def test_every_cell_of_the_notebook_runs_on_the_shipped_model(served: Served, tmp_path: Path) -> None:
    (tmp_path / "statements.jsonl").write_text("".join(_first_groups()))
    changed = {"http://127.0.0.1:8000": served.root, STATEMENTS: "statements.jsonl"} | SHIPPED
    changed |= {INSTALL: f"{INSTALL} --url {served.root}"}
    printed = run(_code(), tmp_path, served.cluster.env, changed)
    assert len(_steered(printed)) == 6, "an answer for each prompt and scale"
    assert "'lag': 0" in printed.splitlines()[-1], "the gate of the last answer"
    found = json.loads((tmp_path / "results" / "truth" / "probes.json").read_text())
    assert 0 <= found["headline"]["auroc_low"] <= 1


@pytest.mark.long  # minutes: three collections and a server with a real model
def test_the_notebook_finds_with_smollm2_what_it_says(smollm2: Path, served: Served, tmp_path: Path) -> None:
    (tmp_path / "statements.jsonl").write_text("".join(_first_groups()))
    link = served.home / "models" / "smollm2"
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(smollm2)
    httpx.post(f"{served.root}/models/load", json={"model_id": "smollm2"}, timeout=300).raise_for_status()
    changed = {"http://127.0.0.1:8000": served.root, STATEMENTS: "statements.jsonl"}
    changed |= {INSTALL: f"{INSTALL} --url {served.root}", "is-true": "is-true-smollm2"}
    try:
        printed = run(_code(), tmp_path, served.cluster.env, changed)
    finally:
        httpx.post(f"{served.root}/models/unload", json={"model_id": "smollm2"}, timeout=300).raise_for_status()
        link.unlink()
    assert len({line[3:] for line in _steered(printed)}) == 6, "each scale has its own answer"
    found = json.loads((tmp_path / "results" / "truth" / "probes.json").read_text())
    assert found["headline"]["auroc_low"] > found["headline"]["control_high"]


def _code() -> list[str]:
    """The cells that are run here."""
    code = [cell for cell in cells("tutorial") if not cell.startswith(tuple(ELSEWHERE))]
    assert len(code) == len(cells("tutorial")) - len(ELSEWHERE)
    return code


def _steered(printed: str) -> list[str]:
    """The lines that say what an answer became with a scale."""
    return re.findall("[-+][01] Th(?:is morning|e food).*", printed)


def _first_groups() -> list[str]:
    """Ten groups of each topic."""
    lines = (ROOT / STATEMENTS).read_text().splitlines(keepends=True)
    return [line for line in lines if int(json.loads(line)["group"].rpartition("-")[2]) <= 10]
