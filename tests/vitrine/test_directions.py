"""Directions, and steering along them."""

from __future__ import annotations

import json

import numpy as np
import pytest

import vitrine

POINTS = ["layers.0.output", "layers.2.output", "layers.10.output"]


def made(values, labels) -> vitrine.Activations:
    return vitrine.Activations(values, POINTS, [str(i) for i in range(len(values))], "session", [], labels)


@pytest.fixture
def acts() -> vitrine.Activations:
    values = np.random.default_rng(0).normal(size=(7, 3, 5)).astype(np.float32)
    return made(values, np.array([1, 0, 1, 0, 0, 1, 2]))


def test_a_direction_is_steered_along_at_some_tokens_and_in_a_unit_that_it_shows(server):
    acts = server.collect(["Ann has 3", "Tom ran"], "resid_post", labels=["sum", "story"])
    direction = vitrine.difference_of_means(acts, positive="sum")
    steer = direction.at(2, unit="residual_norm", tokens="generated")
    assert repr(steer) == "Steer('layers.2.output', scale=1, tokens='generated', unit='residual_norm')"
    assert steer.operation["tokens"] == "generated"
    assert "tokens" not in direction.at(2, unit="residual_norm").operation  # the server leaves out the first one
    with pytest.raises(ValueError, match="choose positive= from 'sum', 'story'"):
        vitrine.difference_of_means(acts)
    with pytest.raises(ValueError, match="unit: set it on the vector"):
        server.generate("Tom", steer=steer, unit="residual_norm")
    with pytest.raises(TypeError, match="a vector alone names no point"):
        server.generate("Tom", steer=direction.values[2])


def test_a_difference_of_means_is_one_side_less_the_other(acts):
    direction = vitrine.difference_of_means(acts)
    expected = acts.values[[0, 2, 5]].mean(0) - acts.values[[1, 3, 4, 6]].mean(0)
    np.testing.assert_allclose(direction.values, expected, atol=1e-6)
    assert direction.values.dtype == np.float32


@pytest.mark.parametrize(
    ("labels", "message"),
    [(None, "have no labels"), (np.array([1] * 7), "7 of 7 labels are 1"), (np.array([0] * 7), "0 of 7 labels are 1")],
)
def test_a_difference_of_means_needs_two_sides(acts, labels, message):
    with pytest.raises(ValueError, match=message):
        vitrine.difference_of_means(made(acts.values, labels))
    with pytest.raises(ValueError, match=r"0 of 7 labels are 'x': .*; choose positive= from 1, 0, 2"):
        vitrine.difference_of_means(acts, positive="x")


def test_a_difference_of_means_needs_one_token_of_each(acts):
    with pytest.raises(ValueError, match="several tokens"):
        vitrine.difference_of_means(made(list(acts.values), acts.labels))


@pytest.mark.parametrize(("layer", "point"), [(0, 0), (2, 1), (10, 2), (-1, 2), (-3, 0)])
def test_a_direction_is_taken_at_a_layer(acts, layer, point):
    steer = vitrine.difference_of_means(acts).at(layer)
    assert steer.point == POINTS[point]


@pytest.mark.parametrize("layer", [1, 11, -4])
def test_a_layer_that_a_direction_has_not_is_refused(acts, layer):
    with pytest.raises(IndexError, match=f"layer {layer}"):
        vitrine.difference_of_means(acts).at(layer)


def test_a_scaled_direction_is_an_intervention_as_json(acts):
    steer = 2 * -vitrine.difference_of_means(acts).at(2) * np.float32(1.5)
    operation = json.loads(json.dumps(steer.operation))
    assert (operation["op"], operation["point"], operation["scale"]) == ("add", "layers.2.output", -3.0)
    np.testing.assert_allclose(operation["vector"], steer.vector)


def test_a_direction_is_kept_in_a_file(acts, tmp_path):
    direction = vitrine.difference_of_means(acts)
    direction.save(tmp_path / "it.safetensors")
    loaded = vitrine.Direction.load(tmp_path / "it.safetensors")
    np.testing.assert_array_equal(loaded.values, direction.values)
    assert loaded.points == POINTS


def test_the_server_takes_a_direction_as_a_tensor_file(server, client, tmp_path):
    acts = server.collect(["Ann has 3 boxes", "Tom ran"], "layers.*.output", labels=[1, 0])
    direction = vitrine.difference_of_means(acts)
    direction.save(tmp_path / "it.safetensors")
    headers = {"content-type": "application/octet-stream"}
    file = client.post(
        "/tensors", cast_to=object, content=(tmp_path / "it.safetensors").read_bytes(), options={"headers": headers}
    )
    steer = direction.at(3) * 4
    named = steer.operation | {"vector": f"{file['id']}/layers.3.output"}
    assert server.generate("Tom has", max_tokens=8, interventions=[named]) == server.generate(
        "Tom has", max_tokens=8, steer=steer
    )


def test_another_safetensors_file_is_no_direction(tmp_path):
    from safetensors.numpy import save_file

    save_file({"values": np.zeros(3)}, tmp_path / "it.safetensors")
    with pytest.raises(ValueError, match="not written by Direction.save"):
        vitrine.Direction.load(tmp_path / "it.safetensors")


def test_steering_changes_a_text_and_a_scale_of_zero_does_not(server):
    acts = server.collect(["Ann has 3 boxes", "Tom ran"], "layers.*.output", labels=[1, 0])
    steer = vitrine.difference_of_means(acts).at(3)
    texts = [server.generate("Tom has", max_tokens=8, steer=one) for one in (None, steer * 0, [steer * 4, -steer])]
    assert texts[0] == texts[1] != texts[2]
