"""One Ray cluster of two cores and one served model, shared by every test that needs them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent
GSM8K = os.environ.get("GSM8K_DIR")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class Cluster:
    """A head node of two cores, begun as the README says."""

    address: str
    dashboard: str
    env: dict[str, str]
    directory: Path


@dataclass(frozen=True)
class Served:
    """The shipped model behind HTTP."""

    root: str
    cluster: Cluster
    home: Path

    @property
    def base_url(self) -> str:
        return f"{self.root}/v1"


def ended(process: subprocess.Popen[bytes]) -> None:
    """Stop a process and all it started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """`ray start --head --num-cpus=2`, with this process joined to it."""
    import ray

    # Short: Ray puts sockets below it, whose paths may have 107 bytes.
    with tempfile.TemporaryDirectory(prefix="vt-", ignore_cleanup_errors=True) as name:
        directory, port, dashboard = Path(name), free_port(), free_port()
        address = f"127.0.0.1:{port}"
        env = {
            **os.environ,
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "RAY_ADDRESS": address,
            "RAY_AUTH_MODE": "disabled",  # an earlier Ray on this machine may have left a token
            "RAY_USAGE_STATS_ENABLED": "0",
            "VITRINE_HOME": str(directory / "home"),
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": str(ROOT),
        }
        os.environ |= {name: env[name] for name in ("RAY_AUTH_MODE", "RAY_USAGE_STATS_ENABLED", "VITRINE_HOME")}
        command = ["ray", "start", "--head", "--num-cpus=2", f"--port={port}", "--node-ip-address=127.0.0.1"]
        command += [f"--dashboard-port={dashboard}", f"--temp-dir={directory / 'ray'}", "--block"]
        with (directory / "head.log").open("wb") as log:
            head = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
        try:
            _until(lambda: "Ray runtime started" in (directory / "head.log").read_text(), head, directory / "head.log")
            ray.init(address, namespace="vitrine", log_to_driver=False)
            yield Cluster(address, f"http://127.0.0.1:{dashboard}", env, directory)
            ray.shutdown()
        finally:
            ended(head)


@pytest.fixture(scope="session")
def served(cluster: Cluster) -> Iterator[Served]:
    """`serve run serve_app:app` on that cluster, healthy."""
    port = free_port()
    root = f"http://127.0.0.1:{port}"
    start = ["serve", "start", "--http-host=127.0.0.1", f"--http-port={port}"]
    subprocess.run(start, env=cluster.env, check=True, capture_output=True)
    log = cluster.directory / "serve.log"
    with log.open("wb") as out:
        run = subprocess.Popen(
            ["serve", "run", "serve_app:app"], cwd=ROOT, env=cluster.env, stdout=out, stderr=out, start_new_session=True
        )

    def healthy() -> bool:
        try:
            return httpx.get(f"{root}/health", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    try:
        _until(healthy, run, log)
        yield Served(root, cluster, Path(cluster.env["VITRINE_HOME"]))
    finally:
        ended(run)


@pytest.fixture(scope="session")
def gsm8k() -> Path:
    """The real GSM8K test problems."""
    if not GSM8K:
        pytest.skip("GSM8K_DIR names no directory with GSM8K's test.jsonl and train.jsonl")
    return Path(GSM8K) / "test.jsonl"


def _until(ready, process: subprocess.Popen[bytes], log: Path, limit_s: float = 180) -> None:
    deadline = time.monotonic() + limit_s
    while not ready():
        assert process.poll() is None, f"it ended with {process.returncode}:\n{log.read_text()[-3000:]}"
        assert time.monotonic() < deadline, f"not ready after {limit_s} s:\n{log.read_text()[-3000:]}"
        time.sleep(0.2)


with warnings.catch_warnings():
    # Ray Serve's own use of pydantic warns once, at its first import.
    warnings.simplefilter("ignore")
    import ray.serve  # noqa: F401
