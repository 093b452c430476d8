"""The tutorial's notebook runs from its first cell to its last, on a quarter of its statements."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import ROOT, Served

MAKER = runpy.run_path(str(ROOT / "examples" / "make_notebook.py"))
STATEMENTS = "examples/statements/statements.jsonl"
CELLS = [
    "".join(cell["source"])
    for cell in json.loads(Path(MAKER["NOTEBOOK"]).read_text())["cells"]
    if cell["cell_type"] == "code"
]
ELSEWHERE = {
    "%cd -q ..": "the test's directory",
    "%%bash\nmake smollm2": "the fixture `smollm2`",
    "%%bash --bg\nserve run": "the server of the other tests, which loads the model",
}


def test_the_notebook_is_the_page() -> None:
    page = Path(MAKER["PAGE"]).read_text()
    assert json.loads(Path(MAKER["NOTEBOOK"]).read_text()) == MAKER["notebook"](page), "run examples/make_notebook.py"
    for name in ELSEWHERE:
        assert any(cell.startswith(name) for cell in CELLS)


def test_every_cell_of_the_notebook_runs(
    smollm2: Path, served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "statements.jsonl").write_text("".join(_first_groups()))
    (tmp_path / "results").mkdir()
    for name in ("examples", "constraints.txt"):
        (tmp_path / name).symlink_to(ROOT / name)
    environment = served.cluster.env
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", os.environ | environment)
    link = served.home / "models" / "smollm2"
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(smollm2)
    httpx.post(f"{served.root}/models/load", json={"model_id": "smollm2"}, timeout=300).raise_for_status()
    names: dict[str, Any] = {}
    try:
        for cell in CELLS:
            if not cell.startswith(tuple(ELSEWHERE)):
                _run(_here(cell, served), environment, names)
    finally:
        httpx.post(f"{served.root}/models/unload", json={"model_id": "smollm2"}, timeout=300).raise_for_status()
        link.unlink()
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 6
    assert len({line[3:] for line in printed}) == 6, "each scale has its own answer"
    found = json.loads((tmp_path / "results" / "truth" / "probes.json").read_text())
    assert found["headline"]["auroc_low"] > found["headline"]["control"]["auroc"]["high"]


def _first_groups() -> list[str]:
    """Ten groups of each topic."""
    lines = (ROOT / STATEMENTS).read_text().splitlines(keepends=True)
    return [line for line in lines if int(json.loads(line)["group"].rpartition("-")[2]) <= 10]


def _here(cell: str, served: Served) -> str:
    """A cell with the test's server and statements."""
    return cell.replace("http://127.0.0.1:8000", served.root).replace(STATEMENTS, "statements.jsonl")


def _run(cell: str, environment: dict[str, str], names: dict[str, Any]) -> None:
    if not cell.startswith("%%bash\n"):
        exec(cell, names)  # noqa: S102 - the page's own
        return
    command = cell.removeprefix("%%bash\n")
    done = subprocess.run(["bash", "-euc", command], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
