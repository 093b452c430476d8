"""A cluster of two machines that `ray up cluster.yaml` starts from a third, where docs/deploy.md has been followed."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.machines import ROOT, Network

CLUSTER = yaml.safe_load((ROOT / "cluster.yaml").read_text())
SERVE = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
IMAGE = dict(re.findall(r"(\w+)=(\S+)", (ROOT / "ops" / "Dockerfile").read_text().partition("\nENV ")[2]))
(SECRETS,) = re.findall(
    r"^```sh\n(umask[^`]* auth_token\n.*?)```", (ROOT / "docs" / "deploy.md").read_text(), re.M | re.S
)
MACHINES = {"head": "10.77.0.1", "worker": "10.77.0.2", "outside": "10.77.0.3"}
# What no provider gives a machine without docker: one core, and an address, which Ray looks for on the internet.
NODE = "--num-cpus=1 --node-ip-address=$(hostname -I)"

# Starting two nodes takes minutes. Quicker: test_exposure.py claims the refusals.
pytestmark = [pytest.mark.server, pytest.mark.long]


class Cluster(Network):
    """The machines; head and worker wait for `ray up`, which reaches them by ssh as it reaches machines of a cloud."""

    worker: contextlib.ExitStack  # while it is open, the second node is there

    def prepare(self) -> None:
        """Make the secrets, the keys of ssh, each node's environment, which is the image's, and the files for Ray."""
        for name in ("ssh", "host"):
            subprocess.run(["ssh-keygen", "-qt", "ed25519", "-N", "", "-f", self.folder / name], check=True)
        subprocess.run(["bash", "-ec", SECRETS], env=self.env("outside") | {"HF_TOKEN": "hf_x"}, check=True)
        home = f"{self.folder}/home"
        for machine in ("head", "worker"):
            own = self.env(machine) | {name: self.here(value) for name, value in IMAGE.items()} | {"HOME": home}
            kept = {"PYTHONPATH", "HF_HUB_OFFLINE", "RAY_USAGE_STATS_ENABLED", "HOME", *IMAGE}
            # Bash below ssh reads this for each of Ray's workers, too, whose own variables come first.
            lines = [f"export PATH={own['PATH']}", '[ "$VITRINE_HOME" ] && return']
            lines += [f"export {name}={shlex.quote(own[name])}" for name in sorted(kept)]
            (self.folder / machine / ".bashrc").write_text("\n".join(lines))
        names = {"cluster_name", "idle_timeout_minutes", "file_mounts", "setup_commands"}
        config = {name: value for name, value in CLUSTER.items() if name in names or "start_ray" in name}
        nodes = {"type": "local", "head_ip": MACHINES["head"], "worker_ips": [MACHINES["worker"]]}
        config |= {"provider": nodes, "auth": {"ssh_user": "root", "ssh_private_key": f"{self.folder}/ssh"}}
        text = self.here(yaml.safe_dump(config, width=1000)).replace("ray start", f"ray start {NODE}")
        (self.folder / "cluster.yaml").write_text(text)

    def here(self, text: str) -> str:
        """A text with the paths of the image, at places where a node of this network may write."""
        return text.replace("/home/ray", f"{self.folder}/home").replace("/data", f"{self.folder}/home/data")

    def ready(self, machine: str) -> contextlib.AbstractContextManager[Path]:
        """Let a machine answer ssh, whose user has the machine's home."""
        options = ["PidFile=none", "StrictModes=no", "UsePAM=no", f"HostKey={self.folder}/host"]
        options += [f"AuthorizedKeysFile={self.folder}/ssh.pub"]
        server = shlex.join(["/usr/sbin/sshd", "-De", "-f/dev/null", *(f"-o{option}" for option in options)])
        users = Path("/etc/passwd").read_text().replace(":/root:", f":{self.folder}/home:")
        (self.folder / "passwd").write_text(users)
        places = f"mount -t tmpfs tmpfs /run; mkdir /run/sshd; mount --bind {self.folder}/passwd /etc/passwd"
        return self.running(machine, f"{places}; {server}")

    def ray(self, *command: str | Path) -> subprocess.CompletedProcess[str]:
        """What a command of Ray says on the machine outside."""
        line = self.command("outside", shlex.join(["ray", *map(str, command)]))
        env = self.env("outside") | {"RAY_UP_enable_autoscaler_v2": "0"}  # it loses a local head
        return subprocess.run(line, env=env, capture_output=True, text=True, timeout=580)

    def on_head(self, command: str) -> subprocess.CompletedProcess[str]:
        """What a command says on the head, by `ray exec`."""
        return self.ray("exec", self.folder / "cluster.yaml", command)

    @property
    def key(self) -> str:
        """The administrator's."""
        return (self.folder / "outside/.vitrine/cluster/keys").read_text().strip().partition(":")[2]


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if missing := [
        name for name in ("sshd", "ssh", "rsync", "redis-server") if not shutil.which(name, path="/usr/sbin:/usr/bin")
    ]:
        pytest.skip(f"not installed: {', '.join(missing)}")
    try:
        made = Cluster(tmp_path_factory.mktemp("nodes"), MACHINES)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces here: {getattr(error, 'stderr', b'').decode() or error}")
    try:
        made.prepare()
        yield made
    finally:
        made.close()


def deploy(network: Cluster, **own: Any) -> subprocess.CompletedProcess[str]:
    """Deploy serve_config.yaml as the guide says, for machines without GPUs, with these options of the ingress."""
    config = json.loads(network.here(json.dumps(SERVE)))
    small = {"dtype": "auto", "num_gpus": 0, "num_cpus": 1, "threads": 1, "archive": None}
    small |= {"activations_dir": str(network.folder / "store")}
    ingress, model = config["applications"]
    ingress["args"] |= small | own
    model |= {"name": "default.models.vitrine-demo"}
    model["args"] |= small | {"model": "vitrine-demo", "autoscaling": {"min_replicas": 2, "max_replicas": 2}}
    path = network.folder / "serve_config.yaml"
    path.write_text(yaml.safe_dump(config))
    network.ray("rsync-up", network.folder / "cluster.yaml", path, f"{network.folder}/home/serve_config.yaml")
    return network.on_head("serve deploy ~/serve_config.yaml")


@pytest.fixture(scope="module")
def nodes(network: Cluster, eventually: Callable[..., Any]) -> Iterator[Cluster]:
    """Both nodes, with a replica of the shipped model on each."""
    with network.ready("head"), contextlib.ExitStack() as network.worker:
        network.worker.enter_context(network.ready("worker"))
        up = ("up", "-y", "--no-config-cache", network.folder / "cluster.yaml")
        eventually(
            lambda: network.ray(*up), lambda done: done.returncode == 0, limit_s=580
        )  # Ray waits 30 s for a node
        eventually(lambda: deploy(network).returncode == 0, limit_s=240)
        look = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=30).read().decode())"
        health = [sys.executable, "-c", look, f"http://{MACHINES['head']}:8000/health"]
        both = '"RUNNING":2'
        eventually(lambda: network.asked("outside", *health).stdout, lambda said: both in said, limit_s=580)
        yield network


@pytest.fixture(scope="module")
def attack(nodes: Cluster) -> dict[str, Any]:
    """What came of the attacks."""
    hosts = [MACHINES["head"], MACHINES["worker"]]
    (nodes.folder / "marks").mkdir()
    token = (nodes.folder / "outside/.vitrine/cluster/auth_token").read_text()
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


def asked(nodes: Cluster, what: str, *args: str) -> Any:
    """What a client beside the cluster gets; see two_nodes_client.py."""
    script = Path(__file__).with_name("two_nodes_client.py")
    done = nodes.asked("outside", sys.executable, script, f"http://{MACHINES['head']}:8000", nodes.key, what, *args)
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
    eventually(lambda: asked(nodes, "health", ""), lambda said: said.get("replicas") == wanted, limit_s=580)


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
    nodes.worker.close()
    assert asked(nodes, "read", "stays").keys() == set(made)
    nodes.worker.enter_context(nodes.ready("worker"))  # the autoscaler starts Ray on it
    both_run(nodes, eventually)
    more = asked(nodes, "record", "stays")
    assert asked(nodes, "read", "stays").keys() == {*made, *more}


def test_a_job_of_the_cluster_evaluates_the_model(nodes):
    setting = json.dumps({"env_vars": {"OPENAI_API_KEY": nodes.key}})
    options = "--samples 2 --mode no-tools --collect-activations"
    job = f"ray job submit --runtime-env-json {shlex.quote(setting)} -- python -m evals.gsm8k {options}"
    done = nodes.on_head(job)
    assert done.returncode == 0, done.stdout + done.stderr
    (results,) = (nodes.folder / "head" / "data" / "vitrine" / "results").iterdir()
    assert json.loads((results / "config.json").read_text())["config"]["samples"] == 2


def test_the_same_cluster_does_not_serve_without_keys(nodes, eventually):
    assert deploy(nodes, api_keys_file=None).returncode == 0

    def status() -> str:
        return nodes.on_head("serve status").stdout

    said = eventually(status, lambda said: "DEPLOY_FAILED" in said, limit_s=240)
    assert "without API keys" in said
    assert "set open=true" in " ".join(said.split())
