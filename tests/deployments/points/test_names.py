"""Names of points as text: TransformerLens' names, wildcards, layers from the last."""

from __future__ import annotations

import pytest

from deployments.points.names import canonical, matching, recorded

NAMES = [f"layers.{layer}.{site}" for layer in (0, 1, 11) for site in ("input", "output")] + ["embed.output"]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("blocks.3.hook_resid_pre", "layers.3.input"),
        ("blocks.3.hook_resid_mid", "layers.3.resid_mid"),
        ("blocks.-1.hook_resid_post", "layers.-1.output"),
        ("blocks.*.hook_mlp_out", "layers.*.mlp.output"),
        ("blocks.3.attn.hook_z", "layers.3.attention.heads"),
        ("blocks.3.attn.hook_pattern", "layers.3.attention.weights"),
        ("layers.3.resid_post", "layers.3.output"),
        ("layers[-1].output", "layers.-1.output"),
        ("resid_post", "layers.*.output"),
        ("hook_embed", "embed.output"),
        ("model.layers[3].self_attn.q_proj.output", "model.layers.3.self_attn.q_proj.output"),
        ("layers.3.mlp.output", "layers.3.mlp.output"),
    ],
)
def test_names_of_transformer_lens_mean_points(name, meant):
    assert canonical(name) == meant


def test_patterns_mean_what_was_recorded():
    assert recorded(["layers.-1.output", "resid_pre"], NAMES, 12) == [
        "layers.11.output",
        "layers.0.input",
        "layers.1.input",
        "layers.11.input",
    ]
    assert matching("layers.-2.output", NAMES, 12) == []
    assert matching("layers.*", NAMES) == []  # `*` is one part of a name


def test_what_means_nothing_names_the_nearest():
    with pytest.raises(ValueError, match=r"layers\.2\.output was not recorded; there is layers\..*\.output"):
        recorded(["blocks.2.hook_resid_post", "layers.2.output"][1:], NAMES)
    with pytest.raises(ValueError, match="do not record the number of layers"):
        recorded(["layers.-1.output"], NAMES)
