"""A savepoint gives a point of the model another name."""

from __future__ import annotations

import pytest

from deployments.errors import RequestError
from deployments.places.points import Points
from deployments.points.capture import Capture
from deployments.savepoint import Savepoint


@pytest.fixture
def points(build):
    return Points.learn(build("llama"))


def resolved(points, *names):
    return points.resolve(Capture(points=list(names)))


@pytest.mark.parametrize(
    ("selector", "name"),
    [
        ("layers.1.output", "layers.1.output"),
        ("layers.-1.mlp.input", "layers.2.mlp.input"),
        ("layers.0.attention.heads", "layers.0.attention.heads"),
        ("model.layers[1].self_attn.q_proj.output", "model.layers.1.self_attn.q_proj.output"),
        ("model.layers.1.mlp", "layers.1.mlp.output"),
        ("lm_head", "lm_head.output"),
    ],
)
def test_a_savepoint_is_captured_by_its_name(points, selector, name):
    points.name([Savepoint(name="here", selector=selector)])
    (named,), (plain,) = resolved(points, "here"), resolved(points, name)
    assert named.name == "here"
    assert (named.place, named.shape) == (plain.place, plain.shape)


def test_savepoints_are_what_a_request_without_points_records(points):
    points.name([Savepoint(name="b", selector="norm.output"), Savepoint(name="a", selector="embed.output")])
    assert [point.name for point in points.resolve(Capture())] == ["a", "b"]  # as a forward reaches them
    assert [point.name for point in points.resolve(Capture(layers=[1], sites=["output"]))] == ["layers.1.output"]


@pytest.mark.parametrize(
    ("savepoints", "field", "match"),
    [
        ([("a", "layers.1.outptu")], "savepoints[0].selector", "layers.1.output"),
        ([("a", "norm.output"), ("b", "layers.9.output")], "savepoints[1].selector", "no layer 9"),
        ([("a", "layers.*.output")], "savepoints[0].selector", "several"),
        ([("a", "norm.output"), ("a", "norm.input")], "savepoints[1].name", "taken"),
        ([("run_id", "norm.output")], "savepoints[0].name", "taken"),
        ([("a", "__class__")], "savepoints[0].selector", "is not a capture point"),
    ],
)
def test_what_is_not_one_point_is_refused_by_its_field(points, savepoints, field, match):
    with pytest.raises(RequestError, match=match) as refused:
        points.name([Savepoint(name=name, selector=selector) for name, selector in savepoints])
    assert refused.value.field == field


def test_a_savepoint_is_among_the_nearest_names(points):
    points.name([Savepoint(name="resid8", selector="norm.output")])
    with pytest.raises(RequestError, match="resid8"):
        resolved(points, "resid9")
