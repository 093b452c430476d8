"""The notebooks of docs/cookbook.md run from the first cell to the last, on the bundled model."""

from __future__ import annotations

import base64
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from safetensors.numpy import save

import vitrine
from deployments.demo_model import WEIGHTS
from tests.conftest import ROOT
from tests.examples.notebooks import NOTEBOOKS, cells, code_cells, run

ADDRESS = "http://127.0.0.1:8000"
# The bundled model has six layers, and knows pens better than capitals.
SMALL = {
    "recall": {
        '["France", "Germany", "Italy"': '["2", "3", "4"',
        'f"The capital of {country} is"': 'f"Tom has {country} boxes of"',
        "capitals[i], capitals[i - 1]": '" pens", " boxes"',
        "layers=range(2, 30, 3)": "layers=[1, 4]",
        "in range(10)": "in range(1, 3)",
    },
    "refusal": {".at(22)": ".at(4)", "acts.values[24:, 22]": "acts.values[24:, 4]", "max_tokens=8": "max_tokens=2"},
    "monitor": {
        "--model smollm2 --set dtype=float32": f"--base-url {ADDRESS}/v1",
        "layers.14.": "layers.3.",
        "bad.safetensors --name bad": f"bad.safetensors --name own --url {ADDRESS}",  # the monitor's is there
        "n=40, max_tokens=24": "n=40, max_tokens=2",
    },
    "lenses": {
        "fit smollm2": "fit vitrine-demo",
        "--max-tokens 2000": "--max-tokens 128",
        "--chunk 64 --max-tokens 128": "--chunk 64 --max-tokens 64",
        "targets=[capital]": 'targets=[" pens"]',
        "[2::3]": "",
    },
    "errors": {
        "range(11, 150)": "range(2, 10)",
        "#### {has + gets}": "#### {38 if name == 'Ann' else has + gets}",  # which it answers to half of them
        ", 400)": ", 30)",
        "layers.8.output,layers.14.output,layers.20.output,layers.26.output": "layers.1.output",
        "-m evals.gsm8k": f"-m evals.gsm8k --base-url {ADDRESS}/v1",
    },
    "features": {
        "examples/statements/statements.jsonl": "statements.jsonl",
        "layers.11.output": "layers.1.output",
        "layers.12.output": "layers.4.output",
        ".at(12)": ".at(4)",
        "--out results/sae": "--features 64 --k 8 --epochs 8 --batch-size 128 --out results/sae",
        "--model smollm2 --tokenizer ~/.vitrine/models/smollm2": f"--model vitrine-demo --tokenizer {WEIGHTS}",
        "add results/sae": f"add results/sae --url {ADDRESS}",
        "[:750]": "[:30]",
        "== 10 and": "and",
        '(" wine", " shoes", " books", " pizza", " snow", " has", " twice")': "list(words)[:2]",
        '(" wine", " shoes", " books", " pizza", " snow")': "list(words)[:1]",
    },
}
MONITOR = {"readout": "bad", "above": 0.9, "for": 2}
EXPECTED = {
    "recall": "PatchGrid(6 rows x 2 tokens",
    "refusal": "capped: a random one",
    "monitor": "bad  beginning: fired in",
    "lenses": "jacobian",
    "errors": "AUROC of sizes and carries",
    "features": '"lag": 0',
}


@pytest.fixture(scope="module")
def watched(tmp_path_factory) -> Iterator[tuple[vitrine.Server, Path]]:
    """A server of the bundled model with the cookbook's monitor, and its home."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VITRINE_HOME", str(home))
        with vitrine.serve(monitors=[MONITOR], monitor_log=str(home / "monitor")) as server:
            spec = {"name": "bad", "model": server.model, "point": "layers.3.output", "kind": "linear"}
            form = {"spec": (None, json.dumps(spec)), "file": save({"weight": np.ones((1, 192), "float32")})}
            httpx.post(f"{server.url}/v1/readouts", files=form).raise_for_status()
            yield server, home


def test_the_monitor_here_is_the_notebooks() -> None:
    sources = ["".join(cell["source"]) for cell in code_cells("monitor")]
    assert str(MONITOR).replace("'", '"') in "".join(sources)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_has_small_outputs_of_a_run_of_all_its_cells(name: str) -> None:
    assert [cell["execution_count"] for cell in code_cells(name)] == list(range(1, len(code_cells(name)) + 1))
    outputs = [output for cell in code_cells(name) for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} <= {"stream", "display_data", "execute_result"}
    for output in outputs:
        assert output.get("name") != "stderr"
        assert not re.search(r"/(root|home|tmp|work)/", json.dumps(output.get("text", "")))
        assert len(base64.b64decode(output.get("data", {}).get("image/png", ""))) < 150_000
    assert "does not show" in "".join(NOTEBOOKS[name]["cells"][-1]["source"]).replace("do not show", "does not show")


@pytest.mark.parametrize("name", SMALL)
def test_a_notebook_of_the_cookbook_runs(name, watched, tmp_path) -> None:
    server, home = watched
    code = cells(name)
    results = tmp_path / "results"
    results.mkdir()
    (results / "monitor").symlink_to(home / "monitor")
    (results / "train.jsonl").symlink_to(ROOT / "deployments" / "demo_model" / "demo.jsonl")
    statements = (ROOT / "examples" / "statements" / "statements.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "statements.jsonl").write_text("".join(statements[:80]))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "VITRINE_HOME": str(home)}
    printed = run(code, tmp_path, env, SMALL[name] | {ADDRESS: server.url})
    assert EXPECTED[name] in printed
    own = [line for cell in code[1:] if not cell.startswith("%%") for line in cell.splitlines()]
    assert len(own) < 60
