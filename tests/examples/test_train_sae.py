"""The example's autoencoder finds the directions that rows consist of, and becomes a readout."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
from safetensors.torch import save

from deployments.activations.reader.row_reader import RowBatch
from deployments.readouts.files import define, read_saelens
from deployments.readouts.values import Readout

POINT, HIDDEN, DIRECTIONS = "layers.12.output", 16, 8
FILE = Path(__file__).parents[2] / "examples" / "train_sae.py"


def test_it_explains_rows_of_few_directions_and_is_saved_as_saelens_does(tmp_path: Path) -> None:
    found = importlib.util.spec_from_file_location("train_sae", FILE)
    assert found
    assert found.loader
    example = importlib.util.module_from_spec(found)
    found.loader.exec_module(example)
    torch.manual_seed(0)
    directions = torch.linalg.qr(torch.randn(HIDDEN, DIRECTIONS)).Q.T  # [directions, hidden]
    token = torch.randint(DIRECTIONS, (4, 256))
    rows = [
        RowBatch(
            {POINT: 7 * directions[ids] + 0.01 * torch.randn(256, HIDDEN)}, ids.int(), *[torch.zeros(256).int()] * 3
        )
        for ids in token
    ]
    sae = example.train(rows, POINT, 32, 1, 60, 1e-2)
    figures, tops = example.evaluate(sae, rows, POINT)
    assert figures["explained_variance"] > 0.9
    assert 0.5 < figures["l0"] < 2
    assert 0 < figures["dead_features"] < 1
    used = [one for one in tops if one["rows"]]
    assert all(len({id for id, _ in one["top"]}) == 1 for one in used if one["rows"] > 100), "one token each"
    example.save(sae, POINT, "smollm2", tmp_path)
    spec, tensors = read_saelens(tmp_path)
    assert (spec["point"], spec["model"], spec["activation"]) == (POINT, "smollm2", "jumprelu")
    readout = Readout(define(save(tensors), spec | {"name": "sae"}), torch.device("cpu"))
    own = rows[0].points[POINT]
    torch.testing.assert_close(readout.encode(own), sae.features(own), rtol=1e-4, atol=1e-4)
