"""Run by test_nodes: a store on the head node of a cluster of two, and replicas' runs from both.

`two_nodes.py DIRECTORY write` or `two_nodes.py DIRECTORY drain`.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import ray
import torch
from ray._private.node import Node
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

sys.path.append(str(Path(__file__).parent))
from conftest import _make as make
from object_server import object_server

from deployments.activations import load
from deployments.activations.actors.reader import connect_reader
from deployments.activations.actors.store import connect
from deployments.activations.facts import StoreError
from deployments.activations.files.places import place_of
from deployments.activations.nodes.cluster import node_writers
from deployments.activations.nodes.submitting import connect_writer
from deployments.errors import RequestError
from tests.waiting import until

LIMIT_S = 480  # then the stacks are printed


@ray.remote(num_cpus=0)
class Replica:
    """Sends runs as a replica does."""

    def __init__(self, root, store, archive=None):
        self.store = store
        self.writer = connect_writer(root, store, archive)
        self.made = {}

    def writes_itself(self):
        return self.writer._actor_id != self.store._actor_id

    def store_run(self, name, session="session"):
        """Also says on which nodes Ray has the rows then."""
        made = make(name, {"layers.0.output": torch.randn(64, 4096)}, session_id=session)  # too much to go in a call
        rows = ray.put(made.batches[0])
        stored = ray.get(self.writer.write.remote(made.facts, [rows]), timeout=60)
        nodes = ray.experimental.get_object_locations([rows])[rows]["node_ids"]
        assert nodes == [ray.get_runtime_context().get_node_id()], "rows crossed from node to node"
        return stored, made.points

    def begin(self, name, session="session"):
        self.made[name] = make(name, {"layers.0.output": torch.randn(4, 4)}, parts=2, session_id=session)
        batch = ray.put(self.made[name].batches[0])
        ray.get(self.writer.append.remote(session, name, 0, [batch]), timeout=60)

    def finish(self, name):
        made = self.made[name]
        try:
            ray.get(self.writer.write.remote(made.facts, [ray.put(made.batches[1])], 1), timeout=60)
        except StoreError as error:
            return str(error)
        return "stored"


def pid_of_writer() -> int:
    """Of this cluster's, whose processes this one has begun: tests beside it have writers of their own."""
    found = [one.pid for one in psutil.Process().children(recursive=True) if one.name().startswith("ray::NodeWriter")]
    assert len(found) == 1, found
    return found[0]


def wait_for(reader, session: str, expected: set[str]) -> None:
    """Return once the session's runs are these."""

    def found() -> set[str]:
        try:
            listed = ray.get(reader.session.remote(session))
        except (ray.exceptions.ActorUnavailableError, RequestError):  # it starts
            return set()
        return {run["run_id"] for run in listed["runs"]} if listed else set()

    until(found, lambda runs: runs == expected)


def bucket(port: int) -> str:
    """A new bucket of moto's."""
    uri = f"s3://drained/runs?endpoint_override=127.0.0.1:{port}&scheme=http&region=us-east-1"
    place_of(f"{uri}&allow_bucket_creation=true").fs.create_dir("drained")
    return uri


def drain(root: str, archive: str, node: str) -> None:
    """Store a run on a node, which then is to go: its open file is in the bucket before it would be sealed."""
    store, reader = connect(root, archive), connect_reader(root, archive)
    on_it = NodeAffinitySchedulingStrategy(node, soft=False)
    ray.get(Replica.options(scheduling_strategy=on_it).remote(root, store, archive).store_run.remote("drained"))
    wait_for(reader, "session", {"drained"})
    why = [
        "--reason",
        "DRAIN_NODE_REASON_PREEMPTION",
        "--reason-message",
        "test",
        "--deadline-remaining-seconds",
        "600",
    ]
    address = ray.get_runtime_context().gcs_address
    subprocess.run(
        [sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", address, "--node-id", node, *why],
        check=True,
    )
    until(lambda: ray.get(reader.session.remote("session"))["archived"], limit_s=20)


def write(root: str, cluster: Cluster, other: Node) -> None:
    store, reader = connect(root), connect_reader(root)
    here, there = (
        Replica.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node.node_id, soft=False)).remote(
            root, store
        )
        for node in (cluster.head_node, other)
    )
    assert [ray.get(one.writes_itself.remote()) for one in (here, there)] == [False, True]
    runs = {name: ray.get(one.store_run.remote(name)) for name, one in (("h", here), ("t", there), ("u", there))}
    files = {name: stored.points["layers.0.output"].uri for name, (stored, _) in runs.items()}
    assert files["h"] != files["t"] == files["u"]
    for name, (_, points) in runs.items():
        assert torch.equal(load(files[name], name, verify=True)["layers.0.output"], points["layers.0.output"])
    wait_for(reader, "session", {"h", "t", "u"})
    print("both nodes write, and the store lists it")

    ray.get([one.begin.remote(name) for name, one in (("long here", here), ("long there", there))])
    ray.get(there.store_run.remote("kept", "other"))
    assert ray.get(store.delete.remote("session"))
    assert not (Path(root) / "session").exists()
    for name, one in (("long here", here), ("long there", there)):
        assert "was deleted while the run went on" in ray.get(one.finish.remote(name))
    stored, points = ray.get(there.store_run.remote("again"))
    assert torch.equal(load(stored.points["layers.0.output"].uri)["layers.0.output"], points["layers.0.output"])
    wait_for(reader, "session", {"again"})
    print("a deletion reaches the files of both")

    ray.get(there.begin.remote("cut"))
    os.kill(pid_of_writer(), signal.SIGKILL)
    while True:  # until it is up again
        try:
            ray.get(there.store_run.remote("after"))
            break
        except ray.exceptions.RayTaskError as error:
            if not isinstance(error.cause, ray.exceptions.RayError):
                raise
    assert "send the request again" in ray.get(there.finish.remote("cut"))
    print("a killed writer is replaced, and what it had not finished is refused")

    ray.kill(store, no_restart=False)
    ray.get(there.store_run.remote("told", "other"))
    wait_for(reader, "other", {"kept", "told"})
    wait_for(reader, "session", {"again", "after"})
    assert len(node_writers(root)) == 1
    print("a store that starts again knows what the others wrote and hears of what they write")


def main(root: str, part: str) -> None:
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    os.environ |= {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_EC2_METADATA_DISABLED": "true"}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1}, connect=True)
    other = cluster.add_node(num_cpus=1)
    if part == "write":
        write(root, cluster, other)
    else:
        with object_server() as port:
            drain(root, bucket(port), other.node_id)
        print("a node that is drained uploads at once")
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
