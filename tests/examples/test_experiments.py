"""The notebook of experiments runs from its first cell to its last, on the bundled model."""

from __future__ import annotations

import pytest

from tests.examples.notebooks import cells, run

# The bundled model has six layers, and knows pens better than capitals.
SMALL = {
    "The capital of France is Paris. The capital of Germany is": "Tom has 3 boxes of 12 pens. Ann has 4 boxes of 12",
    "The capital of France is": "Tom has 3 boxes of 12",
    "The capital of Germany is": "Tom has 4 boxes of 15",
    '" Paris"': '" pens"',
    '" Berlin"': '" boxes"',
    "layers=[8, 10, 14]": "layers=[1, 2, 3]",
    "layer=18": "layer=2",
    "layers[28]": "layers[4]",
}


def test_the_experiments_are_short() -> None:
    assert sum(len(cell.splitlines()) for cell in cells("experiments")) < 150


@pytest.mark.long  # tests/vitrine has a test of each part
def test_every_experiment_runs_and_the_lens_is_the_same_both_ways(served, runs_code, tmp_path) -> None:
    here = {"http://127.0.0.1:8000": runs_code, "-m evals.gsm8k": f"-m evals.gsm8k --base-url {runs_code}/v1"}
    printed = run(cells("experiments"), tmp_path, served.cluster.env, here | SMALL)
    assert "(40, 6, 192)" in printed
    ranks = next(line for line in printed.splitlines() if line.startswith("[") and line.endswith("]"))
    by_nnsight = next(line for line in printed.splitlines() if line.isdigit())
    assert ranks.strip("[]").split()[4] == by_nnsight
    assert (tmp_path / "results" / "calm" / "report.html").exists()
