"""Operations along directions: their effect on rows equals the formulas of the documentation, in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from deployments.engine.engine import Engine
from deployments.engine.request import Request
from deployments.interventions.resolve import EditResolver
from deployments.interventions.stored_tensors import FetchedTensors
from deployments.points.capture import Capture
from deployments.points.interventions import Interventions

PROMPT = [5, 9, 17, 33, 65, 129, 7, 11]
HIDDEN, HEADS = "layers.0.output", "layers.1.attention.heads"
V, W = np.random.default_rng(0).normal(size=(2, 4, 32))  # for the model's hidden size, or 4 heads of 8


def rows(model, point, *changes):
    """A prompt's rows at a point, [tokens, ...] in float64, with these interventions."""
    specs = TypeAdapter(Interventions).validate_python(
        [{"point": point, "tokens": "all", **change} for change in changes]
    )
    fields = {f"interventions[{i}]": spec for i, spec in enumerate(specs)}
    resolver = EditResolver(model.points, model.device, fields, FetchedTensors({"stored": torch.tensor(W[0])}, {}))
    edits = resolver.of(fields, len(PROMPT), len(PROMPT), lambda: ("", []))
    capture = Capture(points=[point])
    request = Request("a", PROMPT, 0, edits=edits, capture=capture, points=model.points.resolve(capture))
    (done,) = Engine(model).generate([request])
    assert done.captured is not None, done.error
    return done.captured.values[point].double().numpy()


def along(x, v):
    """The lengths of rows along a direction, with a last axis of 1."""
    return (x * v).sum(-1, keepdims=True) / np.linalg.norm(v, axis=-1, keepdims=True)


def unit(v):
    return v / np.linalg.norm(v, axis=-1, keepdims=True)


def rotated(x, v, w, degrees):
    """Through complex numbers: the coordinates in an orthonormal basis of the plane, turned by the angle."""
    first = unit(v)
    second = unit(w - along(w, v) * first)
    turned = (along(x, first) + 1j * along(x, second)) * np.exp(1j * math.radians(degrees))
    return x - along(x, first) * first - along(x, second) * second + turned.real * first + turned.imag * second


v, w = V[0], W[0]
CASES = {
    "cap": ({"op": "clamp_projection", "max": 0.5}, lambda x: x - unit(v) * np.maximum(along(x, v) - 0.5, 0)),
    "floor": ({"op": "clamp_projection", "min": 0.25}, lambda x: x - unit(v) * np.minimum(along(x, v) - 0.25, 0)),
    "rotate": ({"op": "rotate", "toward": "stored", "angle": -170.5}, lambda x: rotated(x, v, w, -170.5)),
    "ablate": ({"op": "ablate", "mean": w.tolist()}, lambda x: x + (along(w, v) - along(x, v)) * unit(v)),
    "replace": ({"op": "replace", "alpha": 0.25}, lambda x: 0.75 * x + 0.25 * v),
    "relative": (
        {"op": "add", "relative": True, "scale": 0.5},
        lambda x: x + 0.5 * np.linalg.norm(x, axis=-1, keepdims=True) * unit(v),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_rows_change_as_documented(tiny, case):
    change, expected = CASES[case]
    model = tiny("qwen3")
    before, after = rows(model, HIDDEN), rows(model, HIDDEN, change | {"vector": v.tolist()})
    np.testing.assert_allclose(after, expected(before), rtol=1e-5, atol=1e-5)
    assert np.abs(after - before).max() > 1e-3
    if case.startswith("rotate"):
        np.testing.assert_allclose(np.linalg.norm(after, axis=-1), np.linalg.norm(before, axis=-1), rtol=1e-6)


def test_chosen_heads_have_directions_and_means_of_their_own(tiny):
    model = tiny("qwen3")
    before = rows(model, HEADS)
    each, mean = V[:2, :8], W[0, :8]
    pair = {"heads": [3, 0], "vector": each.ravel().tolist()}
    ablated = rows(model, HEADS, {"op": "ablate", "mean": mean.tolist()} | pair)
    chosen = before[:, [3, 0]]
    np.testing.assert_allclose(
        ablated[:, [3, 0]], chosen + (along(mean, each) - along(chosen, each)) * unit(each), atol=1e-5
    )
    np.testing.assert_array_equal(ablated[:, 1:3], before[:, 1:3])
    whole = rows(model, HEADS, {"op": "ablate", "mean": mean.tolist(), "heads": [1]})
    np.testing.assert_array_equal(whole[:, 1], np.broadcast_to(mean.astype(np.float32), before[:, 1].shape))
    turned = rows(model, HEADS, {"op": "rotate", "toward": mean.tolist(), "angle": 90} | pair)
    np.testing.assert_allclose(turned[:, [3, 0]], rotated(chosen, each, mean, 90), atol=1e-5)
