"""One Ray cluster of two cores and one served model, shared by every test that needs them."""

from __future__ import annotations

import functools
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from deployments.model_files.smollm2 import FetchError, bring
from deployments.options import default_models_dir
from tests import profiles, waiting  # noqa: F401 - `profiles` for each property
from vitrine.own_server import free_port

ROOT = Path(__file__).parent.parent
CODE_OPTIONS = ("allow_client_code=true", "client_code_timeout_s=10", "client_code_memory_bytes=1000000000")
BIN = Path(sys.executable).parent
GSM8K = os.environ.get("GSM8K_DIR")
MODELS = default_models_dir()  # this machine's: `cluster` has another

# As many processes of tests as cores and more: more threads only wait for each other. Read when torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Before Ray is imported, which reads it once. An earlier Ray on this machine may have left another token.
os.environ |= {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "RAY_raylet_start_wait_time_s": "120",  # 30 else, which a busy machine may take
}


# In a worker's input: the file to which it writes the ids of the tests that need the shared cluster.
NEED_CLUSTER = "need_cluster"


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput[NEED_CLUSTER] = str(_need_cluster(node.config))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give two processes the tests that need the shared cluster, so that two are started; the others file by file."""
    from xdist.scheduler import LoadScopeScheduling

    class Files(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            if nodeid not in self._shared:
                return nodeid.partition("::")[0]
            return "cluster of serve_app" if nodeid.startswith("tests/serve_app/") else "cluster"

        @functools.cached_property
        def _shared(self) -> set[str]:
            return set(json.loads(_need_cluster(config).read_text()))

    config.option.loadscopereorder = False
    return Files(config, log)


@functools.cache
def _need_cluster(config: pytest.Config) -> Path:
    directory = tempfile.TemporaryDirectory(prefix="vt-")
    config.add_cleanup(directory.cleanup)
    return Path(directory.name) / NEED_CLUSTER


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests that need Ray; those take longest and come first, so that all processes end together."""
    shared = {item.nodeid for item in items if "cluster" in getattr(item, "fixturenames", ())}
    for item in items:
        if item.nodeid in shared:
            item.add_marker("server")
    if path := getattr(config, "workerinput", {}).get(NEED_CLUSTER):
        Path(path).write_text(json.dumps(sorted(shared)))  # every worker the same, before any is given tests
    items.sort(key=lambda item: (item.nodeid not in shared, item.get_closest_marker("server") is None))


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

    from serve_app import RAY_ENVIRONMENT

    # Short: Ray puts sockets below it, whose paths may have 107 bytes.
    with tempfile.TemporaryDirectory(prefix="vt-", ignore_cleanup_errors=True) as name:
        directory, port, dashboard = Path(name), free_port(), free_port()
        address = f"127.0.0.1:{port}"
        env = {
            **os.environ,
            **RAY_ENVIRONMENT,
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "RAY_ADDRESS": address,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",  # 15 else: whatever else runs on the machine would come before the servers
            # Idle workers stay for the next task. By default they end after a second while no CPU is free.
            "RAY_num_workers_soft_limit": "8",
            # Ray's and Serve's looks at an idle cluster, which take a tenth of two cores by default.
            "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.3",
            "REPORTER_UPDATE_INTERVAL_MS": "60000",
            "VITRINE_HOME": str(directory / "home"),
            "HF_HUB_OFFLINE": "1",
            "HF_MODULES_CACHE": str(directory / "modules"),
            "PYTHONPATH": str(ROOT),
        }
        os.environ |= {name: env[name] for name in ("RAY_USAGE_STATS_ENABLED", "VITRINE_HOME")}
        command = ["ray", "start", "--head", "--num-cpus=2", f"--port={port}", "--node-ip-address=127.0.0.1"]
        command += [f"--dashboard-port={dashboard}", f"--temp-dir={directory / 'ray'}", "--block", "--num-gpus=0"]
        command += ["--include-log-monitor=false"]  # what replicas log stays in their files
        command += ["--dashboard-agent-listen-port=0"]  # 52365 else, and a second Ray on this machine takes no jobs
        with (directory / "head.log").open("wb") as log:
            head = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
        try:
            until(lambda: "Ray runtime started" in (directory / "head.log").read_text(), head, directory / "head.log")
            ray.init(address, namespace="vitrine", log_to_driver=False)
            yield Cluster(address, f"http://127.0.0.1:{dashboard}", env, directory)
            ray.shutdown()
        finally:
            ended(head)


@pytest.fixture(scope="session")
def served(cluster: Cluster) -> Iterator[Served]:
    """The shipped model's server on that cluster, healthy; with one thread, as all that runs in the tests."""
    port = free_port()
    root = f"http://127.0.0.1:{port}"
    ray.serve.start(http_options={"host": "127.0.0.1", "port": port})
    log = cluster.directory / "serve.log"
    command = ["serve", "run", "serve_app:build_app", "threads=1"]
    with log.open("wb") as out:
        run = subprocess.Popen(command, cwd=ROOT, env=cluster.env, stdout=out, stderr=out, start_new_session=True)

    try:
        until(lambda: healthy(root), run, log)
        yield Served(root, cluster, Path(cluster.env["VITRINE_HOME"]))
    finally:
        ended(run)


@pytest.fixture(scope="session")
def client(served: Served) -> Iterator[openai.OpenAI]:
    """OpenAI's own client, which tries nothing twice."""
    with openai.OpenAI(base_url=served.base_url, api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def statistics(served: Served) -> Callable[[], dict[str, Any]]:
    """What the shipped model's replica counts now."""
    replica = ray.serve.get_deployment_handle("ModelReplica", "default")
    return lambda: replica.statistics.remote().result()


@pytest.fixture(scope="session")
def another_app(served: Served) -> Callable[..., AbstractContextManager[str]]:
    """`another_app(name, *options, **env)`: another application below `/name` while the block runs; gives its root.

    Each takes seconds to start: tests that need the same options share one, such as `runs_code`. A store that it
    started ends with it: tools that ask for the cluster's one store would find two.
    """
    from deployments.activations.actors.store import connect
    from deployments.clusters import STORE, detached_names
    from serve_app import build_app

    @contextmanager
    def run(name: str, *options: str, **env: str) -> Iterator[str]:
        with pytest.MonkeyPatch.context() as patch:
            for variable, value in env.items():
                patch.setenv(variable, value)
            app = build_app({"num_cpus": "0.1", "threads": "1"} | dict(option.split("=", 1) for option in options))
        others = set(detached_names(STORE))
        ray.serve.run(app, name=name, route_prefix=f"/{name}")
        own: set[str] = set()
        try:
            root = f"{served.root}/{name}"
            waiting.until(lambda: healthy(root))
            own = set(detached_names(STORE)) - others
            yield root
        finally:
            ray.serve.delete(name)
            for store in own:
                ray.kill(connect(store))

    return run


@pytest.fixture(scope="session")
def runs_code(another_app: Callable[..., AbstractContextManager[str]]) -> Iterator[str]:
    """The root of an application that runs clients' code, with little memory and time for each job."""
    with another_app("code", *CODE_OPTIONS) as root:
        yield root


@pytest.fixture(scope="session")
def eventually() -> Callable[..., Any]:
    """`eventually(look, fits=bool, limit_s=60)`: what `look()` gives as soon as it fits."""
    return waiting.until


@pytest.fixture(scope="session")
def gsm8k() -> Path:
    """The real GSM8K test problems."""
    if not GSM8K:
        pytest.skip("GSM8K_DIR names no directory with GSM8K's test.jsonl and train.jsonl")
    return Path(GSM8K) / "test.jsonl"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The directory of SmolLM2-135M-Instruct, dequantized from Q4_1: `make smollm2`, 40 seconds once per machine."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of the libraries that convert it
        try:
            return bring(MODELS)
        except FetchError as error:
            pytest.skip(str(error))


@pytest.fixture
def with_mounts(tmp_path: Path) -> Callable[..., None]:
    """`with_mounts(file, *options)`: run a file's tests by a pytest of their own, in a namespace with mounts."""
    namespace = ["unshare", "--user", "--map-root-user", "--mount"]
    try:
        subprocess.run([*namespace, "mount", "-t", "tmpfs", "tmpfs", tmp_path], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no mounts of one's own here: {getattr(error, 'stderr', b'').decode() or error}")

    def run(file: Path, *options: str) -> None:
        command = [*namespace, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file), *options]
        done = subprocess.run([*command, f"--basetemp={tmp_path / 'its'}"], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

    return run


def healthy(root: str) -> bool:
    try:
        return httpx.get(f"{root}/health", timeout=30).status_code == 200
    except httpx.TransportError:
        return False


def until(ready: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    def is_ready() -> bool:
        assert process.poll() is None, f"it ended with {process.returncode}:\n{log.read_text()[-3000:]}"
        return ready()

    waiting.until(is_ready, limit_s=180, describe=lambda _: f"not ready:\n{log.read_text()[-3000:]}")


with warnings.catch_warnings():
    # Ray Serve's own use of pydantic warns once, at its first import.
    warnings.simplefilter("ignore")
    import ray.serve
