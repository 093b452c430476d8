"""The `capture` field accepts what the contract documents and rejects the rest by name."""

import pytest
from pydantic import ValidationError

from deployments.points.capture import Capture


def refused(value):
    """Paths of the fields at fault, without the names of a union's branches."""
    with pytest.raises(ValidationError) as error:
        Capture.model_validate(value)
    faults = [[str(part) for part in fault["loc"]] for fault in error.value.errors()]
    return {".".join(part for part in fault if "[" not in part) for fault in faults}


def test_nothing_asked_for_means_all_tokens_as_they_are_by_reference():
    capture = Capture.model_validate({})
    assert (capture.tokens, capture.dtype, capture.features) == ("all", "model", None)
    assert (capture.destination, capture.mode, capture.required) == ("reference", "generate", False)


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ({"point": ["norm.output"]}, "point"),
        ({"destination": "inline"}, "destination"),  # on the wire it is `return`
        ({"points": []}, "points"),
        ({"points": [""]}, "points.0"),
        ({"points": ["x" * 257]}, "points.0"),
        ({"points": "norm.output"}, "points"),
        ({"sites": []}, "sites"),
        ({"dtype": "int8"}, "dtype"),
        ({"mode": "train"}, "mode"),
        ({"return": "elsewhere"}, "return"),
        ({"required": "yes"}, "required"),
        ({"tags": {"a": 1}}, "tags.a"),
        ({"features": {"first": 0}}, "features.first"),
        ({"features": {"index": [-1]}}, "features.index.0"),
        ({"features": {"index": []}}, "features.index"),
        ({"features": {}}, "features"),
        ({"features": {"first": 1, "index": [0]}}, "features"),
        ({"features": {"first": 1, "last": 1}}, "features.last"),
    ],
)
def test_what_the_contract_has_not_is_refused_by_field(value, field):
    assert field in refused(value)


@pytest.mark.parametrize("layers", [[], ["1"], [1.5], [True], "some", 3])
def test_other_layers_are_refused(layers):
    assert all(path.startswith("layers") for path in refused({"layers": layers}))
