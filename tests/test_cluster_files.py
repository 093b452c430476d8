"""The files for a cluster are valid for Ray and for this project."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest
import ray.autoscaler
import yaml
from ray.serve.schema import ServeDeploySchema

from deployments.options import Options
from serve_app.backend.model_loader import REMOVAL_S
from serve_app.backend.model_registry import CONTROLLER_S
from serve_app.backend.served_model import DESCRIBE_S, GRACE_S

ROOT = Path(__file__).parent.parent
CLUSTER = yaml.safe_load((ROOT / "cluster.yaml").read_text())
SERVE = yaml.safe_load((ROOT / "serve_config.yaml").read_text())


def test_serve_takes_its_configuration():
    ServeDeploySchema.model_validate(SERVE)


def test_every_option_in_the_serve_configuration_is_one():
    options = Options.model_validate(SERVE["applications"][0]["args"])
    assert options.num_replicas > 1


def test_the_guides_example_is_a_configuration_of_this_server():
    (example,) = re.findall(r"^```yaml\n(.*?)^```", (ROOT / "docs" / "deploy.md").read_text(), re.DOTALL | re.MULTILINE)
    found = yaml.safe_load(example)
    ServeDeploySchema.model_validate(found)
    options = Options.model_validate(found["applications"][0]["args"])
    assert options.api_keys_file
    assert found["http_options"]["request_timeout_s"] > options.request_timeout_s


def test_serves_own_limit_comes_after_each_of_the_servers():
    options = Options.model_validate(SERVE["applications"][0]["args"])
    asked = 2 * CONTROLLER_S  # before a model is asked or changed, and after it
    limits = {
        "a request": asked + options.request_timeout_s + GRACE_S,
        "a load": asked + options.load_timeout_s + REMOVAL_S + DESCRIBE_S,
        "an unload": asked + options.request_timeout_s + REMOVAL_S,
    }
    for name, limit_s in limits.items():
        assert SERVE["http_options"]["request_timeout_s"] > limit_s, name


def test_ray_up_takes_the_cluster_file():
    schema = json.loads((Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text())
    jsonschema.validate(CLUSTER, schema)


def test_the_cluster_can_grow_to_all_replicas():
    options = Options.model_validate(SERVE["applications"][0]["args"])
    worker = CLUSTER["available_node_types"]["gpu_worker"]
    assert worker["resources"]["GPU"] * worker["max_workers"] >= options.num_replicas * options.num_gpus
    assert CLUSTER["max_workers"] >= worker["max_workers"]


@pytest.mark.parametrize("name", ["cluster.yaml", "serve_config.yaml"])
def test_every_value_says_its_unit_or_reason(name):
    above = ""
    for number, line in enumerate((ROOT / name).read_text().splitlines()):
        if re.match(r"[\s-]*\w+: *[^\s#]", line):
            assert "# " in line or above.startswith("#"), f"{name}:{number + 1} says neither unit nor reason"
        above = line.strip()
