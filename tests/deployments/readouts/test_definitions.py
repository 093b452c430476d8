"""An invalid readout file is rejected with the field at fault."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save

sys.path.append(str(Path(__file__).parent))  # importlib mode adds no folder
from saes_by_hand import linear, sae

from deployments.errors import RequestError
from deployments.readouts.files import define

HIDDEN = 8


def changed(data: bytes, **tensors: torch.Tensor | None) -> bytes:
    said = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    held = {name: tensor for name, tensor in (load(data) | tensors).items() if tensor is not None}
    return save(held, said)


def test_what_a_sweep_of_probes_writes_goes_in_as_it_is() -> None:
    tensors = load(linear(HIDDEN))
    about = {"name": "truth", "model": "demo", "point": "layers.1.output", "kind": "linear", "activation": "sigmoid"}
    data = save(tensors, about | {"labels": '["true"]', "tokens": "last", "method": "ridge", "description": "words"})
    found = define(data)
    assert (found.spec.name, found.spec.labels, found.hidden, found.size) == ("truth", ["true"], HIDDEN, 1)
    assert define(data, {"name": "other"}).spec.name == "other"


def unknown_dtype() -> bytes:
    header = b'{"weight": {"dtype": "F8_E8M0", "shape": [1, 8], "data_offsets": [0, 8]}}'
    return len(header).to_bytes(8, "little") + header + bytes(8)


@pytest.mark.parametrize(
    ("data", "spec", "field", "says"),
    [
        (b"no file", {}, "file", "safetensors"),
        (b"\xff" * 64, {}, "file", "safetensors"),
        (changed(linear(HIDDEN), weight=torch.full((1, HIDDEN), torch.nan)), {}, "file", "not finite"),
        (changed(linear(HIDDEN), bias=torch.zeros(3)), {}, "file", "'bias' has the shape [3]"),
        (changed(linear(HIDDEN), weight=None), {}, "file", "tensor 'weight' is missing"),
        (changed(linear(HIDDEN), std=None), {}, "file", "send both mean and std"),
        (changed(linear(HIDDEN), std=torch.zeros(HIDDEN)), {}, "file", "not above 0"),
        (changed(linear(HIDDEN), other=torch.zeros(1)), {}, "file", "'other'"),
        (changed(linear(HIDDEN), weight=torch.ones(1, HIDDEN, dtype=torch.int64)), {}, "file", "dtype"),
        (unknown_dtype(), {}, "file", "dtype"),
        (save(load(linear(HIDDEN)), {"spec": "[" * 200_000}), {}, "spec", "it is not JSON"),
        (save(load(linear(HIDDEN)), {"labels": "[" * 200_000}), {}, "file", "labels"),
        (linear(HIDDEN), {"labels": ["a", "b"]}, "spec.labels", "2 labels, but the readout has 1"),
        (linear(HIDDEN), {"name": "../x"}, "spec.name", "pattern"),
        (linear(HIDDEN), {"kind": "sae"}, "spec", "activation"),
        (linear(HIDDEN), {"activation": "topk"}, "spec", "activation"),
        (linear(HIDDEN), {"pont": 1}, "spec.pont", "did you mean 'point'"),
        (sae(HIDDEN, 16, "topk"), {"k": 17}, "spec.k", "17, but the readout has 16"),
        (sae(HIDDEN, 16), {"k": 3}, "spec", "topk needs k"),
        (changed(sae(HIDDEN, 16), W_dec=torch.zeros(16, 9)), {}, "file", "hidden is 8"),
        (changed(sae(HIDDEN, 16, "jumprelu"), threshold=None), {}, "file", "threshold"),
    ],
)
def test_bad_input_is_refused_by_field(data: bytes, spec: dict[str, object], field: str, says: str) -> None:
    with pytest.raises(RequestError, match=".") as refused:
        define(data, spec)
    assert refused.value.field == field
    assert says in refused.value.message
