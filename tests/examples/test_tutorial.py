"""The blocks of docs/tutorial.md run in their order, on a quarter of its statements."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
import pytest

from tests.conftest import ROOT, Served
from tests.examples.notebooks import blocks, run

STATEMENTS = "examples/statements/statements.jsonl"
ELSEWHERE = {
    "%%bash\nmake smollm2": "the fixture `smollm2`",
    "%%bash\nserve run": "the server of the other tests, which loads the model",
}
# The bundled model has 6 layers, and takes seconds where SmolLM2 takes minutes.
BUNDLED = {
    "--model smollm2": "--model vitrine-demo",
    'model="smollm2"': 'model="vitrine-demo"',
    "/v1/models/smollm2": "/v1/models/vitrine-demo",
    "layers.11.output": "layers.1.output",
    "layers.10.output": "layers.0.output",
}


@pytest.mark.long  # four engines and as many reports; each command of it has tests of its own
def test_every_block_runs_on_the_bundled_model(served: Served, tmp_path: Path) -> None:
    (tmp_path / "statements.jsonl").write_text("".join(_first_groups()))
    changed = {"http://127.0.0.1:8000": served.root, STATEMENTS: "statements.jsonl"} | BUNDLED
    printed = run(_code(), tmp_path, served.cluster.env, changed)
    assert len(_steered(printed)) == 6, "a completion for each prompt and scale"
    found = json.loads((tmp_path / "results" / "truth" / "probes.json").read_text())
    assert 0 <= found["headline"]["auroc_low"] <= 1


@pytest.mark.long  # minutes: three collections and a server with a real model
def test_the_tutorial_finds_with_smollm2_what_it_says(smollm2: Path, served: Served, tmp_path: Path) -> None:
    (tmp_path / "statements.jsonl").write_text("".join(_first_groups()))
    link = served.home / "models" / "smollm2"
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(smollm2)
    httpx.post(f"{served.root}/models/load", json={"model_id": "smollm2"}, timeout=300).raise_for_status()
    changed = {"http://127.0.0.1:8000": served.root, STATEMENTS: "statements.jsonl"}
    try:
        printed = run(_code(), tmp_path, served.cluster.env, changed)
    finally:
        httpx.post(f"{served.root}/models/unload", json={"model_id": "smollm2"}, timeout=300).raise_for_status()
        link.unlink()
    assert len({line[3:] for line in _steered(printed)}) == 6, "each scale has its own completion"
    found = json.loads((tmp_path / "results" / "truth" / "probes.json").read_text())
    assert found["headline"]["auroc_low"] > found["headline"]["control_high"]


def _code() -> list[str]:
    """The blocks that are run here."""
    found = blocks(ROOT / "docs" / "tutorial.md")
    code = [block for block in found if not block.startswith(tuple(ELSEWHERE))]
    assert len(code) == len(found) - len(ELSEWHERE)
    return code


def _steered(printed: str) -> list[str]:
    """The lines that say what a completion became with a scale."""
    return re.findall("[-+][01] Th(?:is morning|e food).*", printed)


def _first_groups() -> list[str]:
    """Ten groups of each topic."""
    lines = (ROOT / STATEMENTS).read_text().splitlines(keepends=True)
    return [line for line in lines if int(json.loads(line)["group"].rpartition("-")[2]) <= 10]
