"""What `/models/load` accepts: names and data, no paths."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from serve_app.schemas.models import LoadRequest


@pytest.mark.parametrize("model_id", ["gpt2", "Qwen/Qwen3-0.6B", "vitrine-demo"])
def test_a_model_is_named_as_a_repository(model_id):
    assert LoadRequest(model_id=model_id).model_id == model_id


@pytest.mark.parametrize(
    "model_id",
    ["", "/etc", "../up", "a/../b", "~/models", "a/b/c", "C:\\models", "file:///etc", "a--b", "./here", "a\0b", "é/b"],
)
def test_a_path_is_no_model(model_id):
    with pytest.raises(ValidationError, match="model_id"):
        LoadRequest(model_id=model_id)
    with pytest.raises(ValidationError, match="adapter"):
        LoadRequest(model_id="a/b", adapter=model_id)


@pytest.mark.parametrize("revision", ["../up", "/etc", "", "a/../../b", "x" * 129])
def test_a_path_is_no_revision(revision):
    with pytest.raises(ValidationError, match="revision"):
        LoadRequest(model_id="a/b", revision=revision)


@pytest.mark.parametrize("device_map", ["auto", "cpu", "cuda:1", {"": 0}, {"model.layers.0": "cuda:1", "lm_head": 0}])
def test_a_device_map_goes_through_as_it_is(device_map):
    assert LoadRequest(model_id="a/b", device_map=device_map).settings == {"device_map": device_map}


@pytest.mark.parametrize("device_map", ["disk", "meta", {"": "disk"}, {"": -1}, {}, {"a": ["b"]}, 3])
def test_what_is_no_device_is_refused(device_map):
    with pytest.raises(ValidationError, match="device_map"):
        LoadRequest(model_id="a/b", device_map=device_map)


@pytest.mark.parametrize("name", ["layers.1.output", "", "1st", "x" * 65, "a b"])
def test_a_savepoints_name_hides_no_point(name):
    with pytest.raises(ValidationError, match="savepoints"):
        LoadRequest(model_id="a/b", savepoints=[{"name": name, "selector": "norm.output"}])


def test_only_what_a_request_names_has_to_be_as_it_is_loaded():
    assert LoadRequest(model_id="a/b").settings == {}
    assert LoadRequest(model_id="a/b", revision=None, num_replicas=2).settings == {"revision": None, "num_replicas": 2}


def test_replicas_scale_within_bounds():
    scaling = {"min_replicas": 0, "max_replicas": 2, "upscale_delay_s": 1}
    assert LoadRequest(model_id="a/b", autoscaling=scaling).settings == {"autoscaling": scaling}
    for wrong in ({"max_replicas": 129}, {"min_replicas": 2}, {"policy": {}}, {"downscale_delay_s": -1}):
        with pytest.raises(ValidationError, match="max_replicas|policy|downscale_delay_s"):
            LoadRequest(model_id="a/b", autoscaling=wrong)
    with pytest.raises(ValidationError, match="either num_replicas or autoscaling"):
        LoadRequest(model_id="a/b", autoscaling=scaling, num_replicas=2)
