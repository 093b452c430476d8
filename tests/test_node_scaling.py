"""Ray's autoscaler adds a node for a replica that finds no place, and gives it back when it is idle."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import yaml
from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID, FAKE_HEAD_NODE_TYPE

from tests.machines import Network

HEAD = "10.78.0.1"
# Ray's provider of nodes that are processes of this machine; its wheel lacks the file with these settings.
PROVIDER = {
    "type": "external",
    "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
    **dict.fromkeys(("use_node_id_as_ip", "disable_node_updaters", "disable_launch_config_check"), True),
    **{"launch_multiple": True, "head_node_id": FAKE_HEAD_NODE_ID, "gcs_address": f"{HEAD}:6379"},
}
TYPES = {
    FAKE_HEAD_NODE_TYPE: {"resources": {}, "node_config": {}, "max_workers": 0},
    "one_core": {"resources": {"CPU": 1}, "node_config": {}, "max_workers": 2},
}
CONFIG = {"provider": PROVIDER, "available_node_types": TYPES, "head_node_type": FAKE_HEAD_NODE_TYPE, "auth": {}}
CONFIG |= {"cluster_name": "scaling", "max_workers": 2, "idle_timeout_minutes": 0.1, "upscaling_speed": 1.0}
CONFIG |= {f"{name}setup_commands": [] for name in ("", "head_", "worker_")} | {"cluster_synced_files": []}
START = f"""ip route add default dev eth0
export RAY_FAKE_CLUSTER=1 RAY_enable_autoscaler_v2=1 AUTOSCALER_UPDATE_INTERVAL_S=1
export RAY_CLOUD_INSTANCE_ID={FAKE_HEAD_NODE_ID} RAY_NODE_TYPE_NAME={FAKE_HEAD_NODE_TYPE}
export RAY_OVERRIDE_NODE_ID_FOR_TESTING={FAKE_HEAD_NODE_ID}
until ray start --head --port=6379 --num-cpus=0 --block --autoscaling-config=$HOME/ray.yaml; do ray stop; done"""
OPTIONS = {"model": "vitrine-demo", "num_cpus": 1, "threads": 1, "num_gpus": 0, "insecure_ray": True}
LOOK = "import urllib.request; print(urllib.request.urlopen('http://127.0.0.1:8000/health').read().decode())"
NODES = ("ray", "list", "nodes", "--address=http://127.0.0.1:8265", "--filter=state=ALIVE", "--format=json")


@pytest.mark.server
@pytest.mark.long  # quicker: the tests of one node's replicas
def test_a_node_comes_for_a_second_replica_and_leaves_after_it(tmp_path, eventually):
    try:
        network = Network(tmp_path, {"head": HEAD})
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces here: {error}")
    app = {"name": "default", "route_prefix": "/", "import_path": "serve_app:build_app"}
    app |= {"args": OPTIONS | {"activations_dir": str(tmp_path / "store")}}

    def deployed(replicas):
        own = {"deployments": [{"name": "ModelReplica", "num_replicas": replicas}]}
        (tmp_path / "serve.yaml").write_text(
            yaml.safe_dump({"http_options": {"host": "127.0.0.1"}, "applications": [app | own]})
        )
        return network.asked("head", "serve", "deploy", tmp_path / "serve.yaml").returncode == 0

    def state():
        """The nodes beside the head, and the replicas that serve."""
        nodes = json.loads(network.asked("head", *NODES).stdout or "[]")
        health = json.loads(network.asked("head", sys.executable, "-c", LOOK).stdout or "{}")
        return len(nodes) - 1, health.get("replicas", {}).get("vitrine-demo", {}).get("RUNNING", 0)

    (tmp_path / "head" / "ray.yaml").write_text(yaml.safe_dump(CONFIG))
    try:
        with network.running("head", START):
            for count in (1, 2, 1):
                eventually(lambda count=count: deployed(count), limit_s=580)
                eventually(state, lambda seen, count=count: seen == (count, count), limit_s=580)
    finally:
        network.close()
