"""The notebooks of docs/cookbook.md run from the first cell to the last, on the shipped model."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from safetensors.numpy import save

import vitrine
from tests.conftest import ROOT
from tests.examples.notebooks import MAKER, cells, run

ELSEWHERE = ("%cd -q ..", "%%bash\nmake smollm2", "%%bash --bg\nserve run", "%%bash\ncurl")
# The shipped model has six layers, and knows pens better than capitals.
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
        "layers.14.": "layers.3.",
        " --install http://127.0.0.1:8000": "",  # its monitor needs it before: it is a readout of other weights here
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
    },
}
MONITOR = {"readout": "bad", "above": 0.9, "for": 2}
EXPECTED = {
    "recall": "PatchGrid(6 rows x 2 tokens",
    "refusal": "capped: a random one",
    "monitor": "bad  beginning: fired in",
    "lenses": "jacobian",
    "errors": "AUROC of sizes and carries",
}


@pytest.fixture(scope="module")
def watched(tmp_path_factory) -> Iterator[tuple[vitrine.Server, Path]]:
    """A server of the shipped model with the cookbook's monitor, and its home."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VITRINE_HOME", str(home))
        with vitrine.serve(monitors=[MONITOR], monitor_log=str(home / "monitor")) as server:
            spec = {"name": "bad", "model": server.model, "point": "layers.3.output", "kind": "linear"}
            form = {"spec": (None, json.dumps(spec)), "file": save({"weight": np.ones((1, 192), "float32")})}
            httpx.post(f"{server.url}/v1/readouts", files=form).raise_for_status()
            yield server, home


def test_the_monitor_here_is_the_pages() -> None:
    assert str(MONITOR).replace("'", '"') in (ROOT / "docs" / "cookbook.md").read_text()


@pytest.mark.parametrize("name", MAKER["RECIPES"])
def test_a_notebook_of_the_cookbook_runs(name, watched, tmp_path) -> None:
    server, home = watched
    code = [cell for cell in cells(name) if not cell.startswith(ELSEWHERE)]
    changed = SMALL[name] | {"http://127.0.0.1:8000": server.url}
    if name == "errors":
        changed["-m evals.gsm8k"] = f"-m evals.gsm8k --base-url {server.url}/v1"
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "monitor").symlink_to(home / "monitor")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    printed = run(code, tmp_path, {**os.environ, "PATH": path, "VITRINE_HOME": str(home)}, changed)
    assert EXPECTED[name] in printed
    own = [line for cell in code[1:] if not cell.startswith("%%") for line in cell.splitlines()]
    assert len(own) < 40
