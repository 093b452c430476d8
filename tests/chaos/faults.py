"""What happens to the cluster. Each function returns when it has done all; the cluster may not be whole yet."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from tests.chaos.cluster import MACHINES, REPLICA, SETTLE_S, Chaos
from tests.waiting import until

INGRESS = "ServeReplica:default:Ingress"
PARTITION_S = 40
AWAY_S = 10  # of a machine that returns


@dataclass(frozen=True)
class Fault:
    """One fault: what it is, what it does, and the seconds within which a request that is sent after it is answered."""

    name: str
    do: Callable[[Chaos], None]
    limit_s: float = 60


def signalled(name: str, number: signal.Signals, *machines: str) -> Callable[[Chaos], None]:
    """Send a signal to the first of an actor's processes, and wait for its end."""

    def do(cluster: Chaos) -> None:
        process = cluster.find(name, *machines)[0]
        os.kill(process, number)
        until(lambda: process not in cluster.find(name, *machines), limit_s=SETTLE_S)

    return do


def worker_away(cluster: Chaos) -> None:
    cluster.stop("first")
    time.sleep(AWAY_S)
    cluster.start("first")


def partition(cluster: Chaos) -> None:
    cluster.plug("first", "down")
    try:
        time.sleep(PARTITION_S)
    finally:
        cluster.plug("first", "up")


def drain(cluster: Chaos) -> None:
    """Drain a worker, as an autoscaler does, end it when its replica has left, and bring it back."""
    alive = {node["node_ip"]: node["node_id"] for node in cluster.state("nodes") if node["state"] == "ALIVE"}
    options = ["--address", f"{MACHINES['head']}:6379", "--node-id", alive[MACHINES["first"]]]
    options += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "it goes"]
    done = cluster.asked("head", "ray", "drain-node", *options, "--deadline-remaining-seconds", "30")
    assert done.returncode == 0, done.stderr
    time.sleep(AWAY_S)
    worker_away(cluster)


def disk_full(cluster: Chaos) -> None:
    """Fill the store's disk while the bucket answers nothing but errors."""
    filler = cluster.folder / "store/filler"
    cluster.objects.fails = lambda method, path: True
    try:
        with filler.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(1 << 20))
            except OSError:
                time.sleep(AWAY_S)
    finally:
        filler.unlink()
        cluster.objects.fails = lambda method, path: False


def redeployed(cluster: Chaos) -> None:
    before = set(cluster.find(REPLICA))
    cluster.deploy(max_running=32)
    until(lambda: not before & set(cluster.find(REPLICA)), limit_s=SETTLE_S)


def head_away(cluster: Chaos) -> None:
    cluster.stop("head")
    time.sleep(AWAY_S)
    cluster.start("head")


FAULTS = [
    Fault("a replica is killed", signalled(REPLICA, signal.SIGKILL)),
    Fault("a replica hangs", signalled(REPLICA, signal.SIGSTOP)),
    Fault("the ingress hangs", signalled(INGRESS, signal.SIGSTOP), 120),
    Fault("the proxy hangs", signalled("ProxyActor", signal.SIGSTOP), 120),
    Fault("Serve's controller is killed", signalled("ServeController", signal.SIGKILL)),
    Fault("the store is killed", signalled("ActivationStore", signal.SIGKILL)),
    Fault("a node's writer is killed", signalled("NodeWriter", signal.SIGKILL)),
    Fault("a worker is lost and returns", worker_away),
    Fault(f"a worker is off the network for {PARTITION_S} s", partition),
    Fault("a worker is drained and ends", drain),
    Fault("the store's disk is full, the bucket offline", disk_full),
    Fault("another deployment under load", redeployed),
    Fault("the head is lost and returns", head_away, 240),
]
