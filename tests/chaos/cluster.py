"""A head and two workers on machines of their own, with Ray as cluster.yaml starts it, and a bucket beside them."""

from __future__ import annotations

import contextlib
import secrets
import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import yaml

from serve_app import RAY_ENVIRONMENT
from tests.deployments.activations.object_server import ObjectServer
from tests.machines import ROOT, Network
from tests.waiting import until

MACHINES = {"head": "10.78.0.1", "first": "10.78.0.2", "second": "10.78.0.3", "outside": "10.78.0.4"}
WORKERS = ("first", "second")
REPLICA = "ServeReplica:default:ModelReplica"
SERVER = f"http://{MACHINES['head']}:8000"
REQUEST_S = 60  # the server's limit of a request
SETTLE_S = 300  # for which a cluster may take to be whole again, on a busy machine
DISK_BYTES = 512 << 20
STARTS = yaml.safe_load((ROOT / "cluster.yaml").read_text())
SERVE = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
# 30 and 60 else: a busy machine may take longer to start a node.
PATIENT = {"RAY_raylet_start_wait_time_s": "240", "RAY_gcs_rpc_server_reconnect_timeout_s": "900"}
BUCKET = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_EC2_METADATA_DISABLED": "true"}


class Chaos(Network):
    """The machines, and what tests see and change of them.

    Attributes:
        objects: The bucket's server.
        http: A client of the server, on the machine outside.
    """

    def __init__(self, folder: Path) -> None:
        self._token, self._key = secrets.token_hex(32), secrets.token_hex(16)
        super().__init__(folder, MACHINES)
        self._nodes = {machine: contextlib.ExitStack() for machine in ("head", *WORKERS)}
        self._at = {machine: self.threads(machine) for machine in ("head", "outside")}
        self.objects = self._at["outside"].submit(ObjectServer, MACHINES["outside"]).result()
        self.headers = {"Authorization": f"Bearer {self._key}"}
        for machine in self._nodes:
            own = self.folder / machine
            for name, text in {".ray/auth_token": self._token, "keys": f"admin@me:{self._key}"}.items():
                (own / name).parent.mkdir(exist_ok=True)
                (own / name).write_text(text)
                (own / name).chmod(0o600)

    def env(self, machine: str) -> dict[str, str]:
        """A node's environment."""
        return super().env(machine) | RAY_ENVIRONMENT | BUCKET | PATIENT | {"RAY_AUTH_MODE": "token"}

    @contextlib.contextmanager
    def serving(self) -> Iterator[Chaos]:
        """The cluster while the block runs, with a replica on each worker."""
        disk = self.folder / "store"
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", disk], check=True)
        try:
            for machine in self._nodes:
                self.start(machine)
            self.deploy()
            until(self.whole, limit_s=SETTLE_S, describe=lambda _: f"not whole: {self.health()}")
            yield self
        finally:
            for machine in self._nodes:
                self.stop(machine)
            subprocess.run(["umount", "--lazy", disk], check=True)
            self.objects.close()
            self.close()

    def start(self, machine: str) -> None:
        """Start Ray on a node by its command in cluster.yaml."""
        kind = "head" if machine == "head" else "worker"
        *before, line = (line for line in STARTS[f"{kind}_start_ray_commands"] if line != "ray stop")
        words = [word for word in shlex.split(line) if not word.startswith("--autoscaling-config")]
        command = " && ".join([*before, " ".join(words)]).replace("$RAY_HEAD_IP", MACHINES["head"])
        command = command.replace("/data", str(self.folder / machine))
        command += f" --num-cpus={int(machine in WORKERS)} --node-ip-address={MACHINES[machine]} --block"
        if kind == "worker":  # one that the head took for lost ends, and is started again as by `ray up`
            command = f"while true; do {command} || sleep 1; done"
        log = self._nodes[machine].enter_context(self.running(machine, command))
        until(lambda: "Ray runtime started" in log.read_text(), limit_s=SETTLE_S, describe=lambda _: log.read_text())

    def stop(self, machine: str) -> None:
        """End all processes of a node at once."""
        self._nodes[machine].close()

    def deploy(self, **own: Any) -> None:
        """Deploy the shipped model with these options besides."""
        archive = f"s3://bucket/store?endpoint_override={MACHINES['outside']}:{self.objects.port}&scheme=http"
        args = {"activations_dir": str(self.folder / "store"), "archive": f"{archive}&allow_bucket_creation=true"}
        args |= {"model": "vitrine-demo", "api_keys_file": str(self.folder / "head/keys"), "num_replicas": 2}
        args |= {"num_cpus": 1, "num_gpus": 0, "threads": 1, "batch_invariant": True, "request_timeout_s": REQUEST_S}
        app = {"name": "default", "route_prefix": "/", "import_path": "serve_app:build_app", "args": args | own}
        path = self.folder / "serve_config.yaml"
        path.write_text(yaml.safe_dump(SERVE | {"applications": [app]}))
        until(lambda: self.asked("head", "serve", "deploy", path).returncode == 0, limit_s=SETTLE_S)

    def client(self, task: Callable[[], Any]) -> Any:
        """What a function gives that runs on a thread of the machine outside."""
        return self._at["outside"].submit(task)

    def get(self, path: str, **headers: str) -> httpx.Response:
        """An answer of the server."""
        return self.client(lambda: httpx.get(SERVER + path, headers=self.headers | headers, timeout=60)).result()

    def health(self) -> Any:
        """What the server says of its replicas; the error if it says nothing."""
        try:
            return self.get("/health").json()
        except (httpx.TransportError, ValueError) as error:
            return repr(error)

    def whole(self) -> bool:
        """Whether a replica runs on each worker, and nothing else starts or ends."""
        said = self.health()
        running = isinstance(said, dict) and said.get("replicas") == {"vitrine-demo": {"RUNNING": 2}}
        return running and all(self.find(REPLICA, worker) for worker in WORKERS)

    def state(self, what: str) -> list[dict[str, Any]]:
        """What Ray's state API lists of `nodes` or `actors`."""
        url, headers = f"http://127.0.0.1:8265/api/v0/{what}", {"Authorization": f"Bearer {self._token}"}
        ask = self._at["head"].submit(httpx.get, url, params={"limit": 9999}, headers=headers, timeout=60)
        return list(ask.result().raise_for_status().json()["data"]["result"]["result"])

    def find(self, name: str, *machines: str) -> list[int]:
        """The processes of an actor whose class has this name, on any of these machines, or of all."""
        return [pid for machine in machines or self._nodes for pid in self.processes(machine, f"ray::{name}")]
