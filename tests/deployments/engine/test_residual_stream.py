"""`resid_mid`, the residual stream between attention and MLP: recording and changing it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from deployments.engine.edits import Edit, Tokens
from deployments.engine.engine import Engine
from tests.deployments.conftest import DEVICE

# Attention and MLP read the same in three of them; OPT 350M norms the sum, Gemma 4 scales it.
WITHOUT = {"gpt_neox", "falcon_parallel", "falcon_two_norms", "opt_norms_behind", "gemma4_shared"}
NORMED = {"gemma2", "gemma3", "olmo2", "exaone4", "granite"}  # a norm or factor between attention and the sum


@pytest.fixture
def model(architecture, tiny):
    if architecture in WITHOUT:
        pytest.skip("its layers have no such sum")
    return tiny(architecture)


def test_a_change_of_it_goes_on_in_the_stream(model, prompt, capturing):
    """With the stream of another prompt in its place, the rest of the forward is that prompt's."""
    ids, other, engine = prompt(8, 1), prompt(8, 2), Engine(model)
    at, last = "layers.0.resid_mid", f"layers.{model.points.layer_count - 1}.output"
    asked = [capturing(model, name, of, 0, points=[at, last]) for name, of in {"a": ids, "b": other}.items()]
    own, wanted = engine.generate(asked)
    rows = wanted.captured.values[at]
    edit = Edit(asked[0].points[0], "replace", Tokens(0, 8), vector=rows.to(DEVICE))
    changed, beside = engine.generate([replace(asked[0], edits=(edit,)), replace(asked[0], id="c")])
    torch.testing.assert_close(changed.captured.values[last], wanted.captured.values[last], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(beside.captured.values[last], own.captured.values[last], rtol=1e-4, atol=1e-5)


def test_an_edit_of_attention_comes_before_it(architecture, model, prompt, capturing):
    if architecture in NORMED:
        pytest.skip("what is added is not attention's output")
    names = ["layers.0.attention.output", "layers.0.resid_mid", "layers.0.input"]
    asked = capturing(model, "a", prompt(8), 0, points=names)
    points = {point.name: point for point in asked.points}
    edits = Edit(points[names[1]], "scale", low=2.0), Edit(points[names[0]], "scale", low=0.0)
    (end,) = Engine(model).generate([replace(asked, edits=edits)])
    values = end.captured.values
    torch.testing.assert_close(values[names[1]], 2 * values[names[2]], rtol=1e-5, atol=1e-5)
