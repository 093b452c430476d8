"""The files for a cluster are valid for Ray and for this project, and fit each other."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest
import ray.autoscaler
import yaml
from ray.dashboard.modules.metrics import dashboards
from ray.serve.schema import ServeDeploySchema

import serve_app
from deployments.options import Options
from deployments.replica import metrics
from deployments.replica.metrics import COUNTERS, GAUGES
from serve_app.backend.model_loader import REMOVAL_S
from serve_app.backend.model_registry import CONTROLLER_S
from serve_app.backend.prometheus import UP
from serve_app.backend.served_model import DESCRIBE_S, GRACE_S

ROOT = Path(__file__).parent.parent
CLUSTER = yaml.safe_load((ROOT / "cluster.yaml").read_text())
AS_SHIPPED = (ROOT / "serve_config.yaml").read_text()
SERVE = yaml.safe_load(AS_SHIPPED.replace("<your-bucket>", "my-bucket"))
KUBERNETES = (ROOT / "ops" / "rayservice.yaml").read_text()
SERVICE, *OTHERS = yaml.safe_load_all(KUBERNETES.replace("<your-bucket>", "my-bucket"))
PODS = SERVICE["spec"]["rayClusterConfig"]
EACH_POD = [group["template"]["spec"] for group in (PODS["headGroupSpec"], *PODS["workerGroupSpecs"])]
IMAGE = (ROOT / "ops" / "Dockerfile").read_text()
INGRESS, *MODELS = (Options.model_validate(app["args"]) for app in SERVE["applications"])


def test_serve_takes_its_configuration_and_each_model_has_the_name_by_which_the_ingress_finds_it():
    ServeDeploySchema.model_validate(SERVE)
    ingress, *models = SERVE["applications"]
    names = [f"{ingress['name']}.models.{options.model.replace('/', '--')}" for options in MODELS]
    assert [model["name"] for model in models] == names
    for app in SERVE["applications"]:
        module, builder = app["import_path"].split(":")
        assert module == serve_app.__name__
        assert callable(getattr(serve_app, builder))


def test_the_guides_example_is_a_configuration_of_this_server():
    text = (ROOT / "docs" / "deploy.md").read_text()
    (example,) = re.findall(r"^```yaml\n# my_server(.*?)^```", text, re.DOTALL | re.MULTILINE)
    found = yaml.safe_load(f"# {example}")
    ServeDeploySchema.model_validate(found)
    options = Options.model_validate(found["applications"][0]["args"])
    assert options.api_keys_file
    assert found["http_options"]["request_timeout_s"] > options.request_timeout_s


def test_serves_own_limit_comes_after_each_of_the_servers():
    asked = 2 * CONTROLLER_S  # before a model is asked or changed, and after it
    limits = {
        "a request": asked + INGRESS.request_timeout_s + GRACE_S,
        "a load": asked + INGRESS.load_timeout_s + REMOVAL_S + DESCRIBE_S,
        "an unload": asked + INGRESS.request_timeout_s + REMOVAL_S,
    }
    for name, limit_s in limits.items():
        assert SERVE["http_options"]["request_timeout_s"] > limit_s, name


def test_ray_up_takes_the_cluster_file():
    schema = json.loads((Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text())
    jsonschema.validate(CLUSTER, schema)


def test_both_clusters_can_grow_to_all_replicas():
    models = [app["args"] for app in SERVE["applications"][1:]]
    gpus = sum(args["autoscaling"]["max_replicas"] * args["num_gpus"] for args in models)
    worker = CLUSTER["available_node_types"]["gpu_worker"]
    assert worker["resources"]["GPU"] * min(worker["max_workers"], CLUSTER["max_workers"]) >= gpus
    assert PODS["workerGroupSpecs"][0]["maxReplicas"] >= gpus


def test_kubernetes_serves_the_same_from_a_store_that_all_nodes_share():
    same = json.loads(json.dumps(SERVE).replace(INGRESS.activations_dir, "/shared/activations"))
    assert yaml.safe_load(SERVICE["spec"]["serveConfigV2"]) == same


def test_secrets_and_disk_are_mounted_where_the_image_and_the_server_look_for_them():
    (secrets,) = CLUSTER["file_mounts"]
    environment = dict(re.findall(r"(\w+)=(\S+)", IMAGE))
    assert {str(Path(INGRESS.api_keys_file).parent), str(Path(environment["RAY_AUTH_TOKEN_PATH"]).parent)} == {secrets}
    assert environment.items() >= (serve_app.RAY_ENVIRONMENT | {"RAY_AUTH_MODE": "token"}).items()
    assert "-v /data:/data" in CLUSTER["docker"]["run_options"]
    for path in (INGRESS.activations_dir, environment["VITRINE_HOME"], environment["HF_HOME"]):
        assert path.startswith("/data/")
    for pod in EACH_POD:
        paths = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
        assert paths.keys() == {secrets, "/data", "/shared"}
        assert {volume["name"] for volume in pod["volumes"]} == set(paths.values())


def test_every_file_names_the_same_image_with_the_locked_ray():
    (version,) = re.findall(r"^ray==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert f"FROM rayproject/ray:{version}-py312-gpu\n" in IMAGE
    assert PODS["rayVersion"] == version
    images = {pod["containers"][0]["image"] for pod in EACH_POD}
    assert images == {CLUSTER["docker"]["image"]} == set(re.findall(r"docker build .* -t (\S+)", IMAGE))


def test_what_an_operator_must_replace_belongs_to_nobody():
    assert CLUSTER["docker"]["image"].partition("/")[0].endswith(".invalid")  # RFC 2606: it never resolves
    with pytest.raises(ValueError, match="your bucket instead of <your-bucket>"):
        Options.model_validate(yaml.safe_load(AS_SHIPPED)["applications"][0]["args"])
    assert "my-" not in AS_SHIPPED + KUBERNETES + IMAGE


def test_containers_run_without_root_and_cannot_get_it():
    assert re.findall(r"^USER (\S+)$", IMAGE, re.MULTILINE)[-1] == "1000:100"
    assert IMAGE.index("rm /usr/bin/sudo") > IMAGE.rindex("sudo apt-get")
    (redis,) = [part["spec"]["template"]["spec"] for part in OTHERS if part["kind"] == "StatefulSet"]
    for pod in (*EACH_POD, redis):
        assert pod["securityContext"]["runAsNonRoot"]
        assert [one["securityContext"]["allowPrivilegeEscalation"] for one in pod["containers"]] == [False]


def test_alerts_and_dashboard_use_metrics_that_are_there():
    (group,) = yaml.safe_load((ROOT / "ops" / "alerts.yaml").read_text())["groups"]
    panels = json.loads((ROOT / "ops" / "dashboard.json").read_text())["panels"]
    assert all(rule["annotations"].keys() == {"summary", "do"} for rule in group["rules"])
    asked = [query["expr"] for query in (*group["rules"], *(query for panel in panels for query in panel["targets"]))]
    known = {*GAUGES, *(f"{name}_total" for name in COUNTERS)}
    known |= {*re.findall(r'f"\{PREFIX\}(\w+)"', Path(metrics.__file__).read_text())}
    rays = "".join(file.read_text() for file in Path(dashboards.__file__).parent.glob("*.py"))
    for expression in asked:
        names = re.findall(rf"\bray_\w+|\b{UP}", expression)
        assert names, expression
        for name in (name.removesuffix("_bucket") for name in names):
            assert name == UP or name.removeprefix("ray_vitrine_") in known or name in rays, name
