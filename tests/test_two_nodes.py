"""A cluster of two machines, started with cluster.yaml and serve_config.yaml, and attacked from a third.

The machines are network and process namespaces of this one. They need root.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent
CLUSTER = yaml.safe_load((ROOT / "cluster.yaml").read_text())
SERVE = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
KEY = secrets.token_hex(16)
MACHINES = {"head": "10.77.0.1", "worker": "10.77.0.2", "outside": "10.77.0.3"}
HOME = "/home/ray"  # of the nodes, in both files


# Starting two nodes takes minutes. Quicker: test_exposure.py claims the refusals.
pytestmark = [pytest.mark.server, pytest.mark.long]


class Network:
    """Machines that see each other and nothing else."""

    worker: Worker

    def __init__(self, folder: Path) -> None:
        """Make a namespace and a home for each."""
        self._prefix = f"vt{os.getpid()}"
        self.folder = folder
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    def _make(self) -> None:
        self._ip("netns", "add", f"{self._prefix}net")
        self._ip("-n", f"{self._prefix}net", "link", "add", "bridge", "type", "bridge")
        self._ip("-n", f"{self._prefix}net", "link", "set", "bridge", "up")
        for name, address in MACHINES.items():
            inside = ("-n", f"{self._prefix}{name}", "link")
            between = ("-n", f"{self._prefix}net", "link")
            self._ip("netns", "add", f"{self._prefix}{name}")
            self._ip(*inside, "add", "eth0", "type", "veth", "peer", name, "netns", f"{self._prefix}net")
            self._ip(*between, "set", name, "master", "bridge", "up")
            self._ip("-n", f"{self._prefix}{name}", "addr", "add", f"{address}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                self._ip(*inside, "set", device, "up")
            (self.folder / name / "ray").mkdir(parents=True)
            (self.folder / name / "apart").mkdir()
        for name in ("store", "apart"):
            (self.folder / name).mkdir()

    def close(self) -> None:
        """Take the namespaces away."""
        for name in ("net", *MACHINES):
            subprocess.run(["ip", "netns", "del", f"{self._prefix}{name}"], check=False, capture_output=True)

    def env(self, machine: str) -> dict[str, str]:
        """The environment of a machine: its own home, and nothing of Ray's."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "VITRINE_"))}
        own = {"HOME": str(self.folder / machine), "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
        return kept | own | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0"}

    def command(self, machine: str, command: str) -> list[str]:
        """A shell command on a machine, with processes, shared memory and Ray's files of its own."""
        own = f"mount -t tmpfs tmpfs /dev/shm; mkdir -p /tmp/ray; mount --bind {self.folder / machine}/ray /tmp/ray"
        own += (
            f"; mount --bind {self.folder / machine}/apart {self.folder}/apart"  # a disk of its own; `store` is shared
        )
        isolated = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-ec"]
        return ["ip", "netns", "exec", f"{self._prefix}{machine}", *isolated, f"{own}; {command}"]

    def asked(self, machine: str, *command: str | Path) -> subprocess.CompletedProcess[str]:
        """What a program says that uses a machine's network alone."""
        inside = ["ip", "netns", "exec", f"{self._prefix}{machine}", *command]
        return subprocess.run(inside, env=self.env(machine), capture_output=True, text=True, timeout=120)

    @contextlib.contextmanager
    def running(self, machine: str, command: str) -> Iterator[Path]:
        """Run a command while the block runs; gives its log."""
        log = self.folder / f"{machine}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(self.command(machine, command), env=self.env(machine), stdout=out, stderr=out)
        try:
            yield log
        finally:
            process.kill()  # and with it the namespace's first process, and so all of them
            process.wait()

    @staticmethod
    def _ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    folder = tmp_path_factory.mktemp("nodes")
    try:
        made = Network(folder)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces here: {getattr(error, 'stderr', b'').decode() or error}")
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def token(network: Network) -> str:
    """The secrets, made by the commands of cluster.yaml's head and mounted on both nodes as it says."""
    own = network.folder / "own"
    env = network.env("head") | {"HOME": str(own)}
    subprocess.run(["ray", "get-auth-token", "--generate"], env=env, check=True, capture_output=True)
    (own / ".vitrine").mkdir()
    (own / ".vitrine" / "keys").write_text(f"admin@me:{KEY}")
    for machine in ("head", "worker"):
        for there, here in CLUSTER["file_mounts"].items():
            if here.startswith("~/"):
                target = Path(there.replace(HOME, str(network.folder / machine)))
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes((own / here[2:]).read_bytes())
    return (own / ".ray" / "auth_token").read_text().strip()


def start(kind: str, machine: str) -> str:
    """The command by which cluster.yaml starts Ray on a node, with one core, at the machine's address."""
    (command,) = [line for line in CLUSTER[f"{kind}_start_ray_commands"] if "ray start" in line]
    words = [word for word in shlex.split(command) if not word.startswith("--autoscaling-config")]
    line = " ".join(words).replace("$RAY_HEAD_IP", MACHINES["head"])
    return f"{line} --num-cpus=1 --node-ip-address={MACHINES[machine]} --block"


def deploy(network: Network, **own: Any) -> subprocess.CompletedProcess[str]:
    """`serve deploy serve_config.yaml` on the head, for machines without GPUs, with these options besides."""
    config = json.loads(json.dumps(SERVE).replace(HOME, str(network.folder / "head")))
    args = config["applications"][0]["args"]
    args |= {"model": "vitrine-demo", "dtype": "auto", "num_gpus": 0, "num_cpus": 1, "threads": 1}
    args |= {"activations_dir": str(network.folder / "store"), "archive": None} | own
    path = network.folder / "serve_config.yaml"
    path.write_text(yaml.safe_dump(config))
    return network.asked("head", "env", "RAY_AUTH_MODE=token", "serve", "deploy", path)


class Worker:
    """The second node, which can be away for a while."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._running = contextlib.ExitStack()
        self.start()

    def start(self) -> None:
        self._running.enter_context(self._network.running("worker", start("worker", "worker")))

    def stop(self) -> None:
        self._running.close()


@pytest.fixture(scope="module")
def nodes(network: Network, token: str, eventually: Callable[..., Any]) -> Iterator[Network]:
    """Both nodes, with a replica of the shipped model on each."""
    with network.running("head", start("head", "head")) as log:
        eventually(lambda: "Ray runtime started" in log.read_text(), limit_s=240)
        network.worker = Worker(network)
        try:
            eventually(lambda: deploy(network).returncode == 0, limit_s=240)
            look = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=30).read().decode())"
            health = [sys.executable, "-c", look, f"http://{MACHINES['head']}:8000/health"]
            both = '"RUNNING":2'
            eventually(lambda: network.asked("outside", *health).stdout, lambda said: both in said, limit_s=300)
            yield network
        finally:
            network.worker.stop()


@pytest.fixture(scope="module")
def attack(nodes: Network, token: str) -> dict[str, Any]:
    """What came of the attacks."""
    hosts = [MACHINES["head"], MACHINES["worker"]]
    (nodes.folder / "marks").mkdir()
    script, marks = Path(__file__).with_name("outsider.py"), nodes.folder / "marks"
    done = nodes.asked("outside", sys.executable, script, *hosts, f"http://{hosts[0]}:8000", marks, token)
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    return said | {"marks": sorted(mark.name for mark in marks.iterdir())}


def test_a_pickled_call_from_outside_runs_nothing_on_either_node(attack):
    assert all(attack["ports"].values()), attack["ports"]
    assert "UNAUTHENTICATED" in attack["without"].values()
    assert not [mark for mark in attack["marks"] if mark.startswith("without")], attack
    for host in (MACHINES["head"], MACHINES["worker"]):  # the call does what it is meant to do: the token stops it
        assert [mark for mark in attack["marks"] if mark.startswith(f"with-{host}")], attack


def test_without_a_key_only_health_is_answered(attack):
    assert attack["http"] == [200, 401, 401, 401]


def asked(nodes: Network, what: str, *args: str) -> Any:
    """What a client beside the cluster gets; see two_nodes_client.py."""
    script = Path(__file__).with_name("two_nodes_client.py")
    done = nodes.asked("outside", sys.executable, script, f"http://{MACHINES['head']}:8000", KEY, what, *args)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def sent(nodes: Network, machine: str) -> int:
    """The bytes that a machine has sent to others."""
    lines = nodes.asked(machine, "cat", "/proc/net/dev").stdout.splitlines()
    return next(int(line.split()[9]) for line in lines if line.strip().startswith("eth0:"))


def files(store: Path) -> dict[str, int]:
    """The bytes of a store's files by their writers; each node has its own."""
    found = Counter[str]()
    for file in store.glob("me/*/*.arrow"):
        found[file.name.split("-")[1]] += file.stat().st_size
    return found


def both_run(nodes: Network, eventually: Callable[..., Any]) -> None:
    """Wait until each node has a replica that serves."""
    wanted = {"vitrine-demo": {"RUNNING": 2}}
    eventually(lambda: asked(nodes, "health", ""), lambda said: said.get("replicas") == wanted, limit_s=300)


def test_each_node_writes_its_runs_into_a_directory_that_they_share(nodes):
    before = sent(nodes, "worker")
    made = asked(nodes, "record", "both")
    crossed = sent(nodes, "worker") - before
    sizes = files(nodes.folder / "store")
    assert len(sizes) == 2
    assert crossed < min(sizes.values()) / 2, "rows crossed from node to node when they were written"
    listed = {run["run_id"]: run["tokens"] for run in asked(nodes, "look", "both")["runs"]}
    assert listed.keys() == set(made)
    assert asked(nodes, "read", "both") == listed
    assert asked(nodes, "delete", "both") == 200
    assert asked(nodes, "look", "both") is None
    assert not (nodes.folder / "store" / "me" / "both").exists()


def test_runs_of_a_node_that_goes_stay_and_it_writes_on_when_it_is_back(nodes, eventually):
    made = asked(nodes, "record", "stays")
    nodes.worker.stop()
    assert asked(nodes, "read", "stays").keys() == set(made)
    nodes.worker.start()
    both_run(nodes, eventually)
    more = asked(nodes, "record", "stays")
    assert asked(nodes, "read", "stays").keys() == {*made, *more}


def test_runs_of_a_node_that_does_not_share_the_directory_go_through_the_head(nodes, eventually):
    assert deploy(nodes, activations_dir=str(nodes.folder / "apart")).returncode == 0

    def is_apart() -> bool:
        asked(nodes, "record", "through")
        found = asked(nodes, "look", "through")  # of the next server already, if that was not
        return bool(found) and "/apart/" in found["files"][0]["uri"]

    eventually(is_apart, limit_s=300)
    both_run(nodes, eventually)
    before = sent(nodes, "worker")
    there = files(nodes.folder / "head" / "apart")
    made = asked(nodes, "record", "more")
    now = files(nodes.folder / "head" / "apart")
    assert sent(nodes, "worker") - before > (sum(now.values()) - sum(there.values())) / 10
    assert asked(nodes, "read", "more").keys() == set(made)
    assert list((nodes.folder / "worker" / "apart").iterdir()) == []


def test_the_same_cluster_does_not_serve_without_keys(nodes, eventually):
    assert deploy(nodes, api_keys_file=None, model="none").returncode == 0

    def status() -> str:
        return nodes.asked("head", "env", "RAY_AUTH_MODE=token", "serve", "status").stdout

    said = eventually(status, lambda said: "DEPLOY_FAILED" in said, limit_s=240)
    assert "without API keys" in said
    assert "set open=true" in " ".join(said.split())
