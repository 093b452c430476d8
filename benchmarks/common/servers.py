"""The servers that benchmarks compare: this project's, and `transformers serve`."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.common.children import ROOT, answers, child, until
from serve_app import RAY_ENVIRONMENT
from vitrine.own_server import free_port

BIN = Path(sys.executable).parent
NEEDED = ("uvicorn", "fastapi", "openai", "rich")  # of transformers[serving]; modules are named as their packages
KEYS = 100
OWNER = "measured"  # of what is stored with these keys


@dataclass(frozen=True)
class Server:
    """A server that answers.

    Attributes:
        root: Its address, without `/v1`.
        model: The model's id in requests.
        extra: Fields that its requests carry besides OpenAI's.
        session: The session of its processes, whose id is that of the first of them.
        env: The environment of commands that join its Ray.
        keys: API keys without end. A turn takes the next one: a server that remembers the beginnings of prompts does
            so for each key's owner, and would not run those of an earlier turn again.
    """

    root: str
    model: str
    extra: Mapping[str, object] = field(default_factory=dict)
    session: int = 0
    env: Mapping[str, str] = field(default_factory=dict)
    keys: Iterator[str] = field(default_factory=lambda: itertools.repeat("none"))

    @property
    def store(self) -> Path:
        """The directory of this project's activation store."""
        return Path(self.env["VITRINE_HOME"]) / "activations"


@contextlib.contextmanager
def vitrine(model: Path, *, flags: Mapping[str, str] | None = None, options: Sequence[str] = ()) -> Iterator[Server]:
    """This project's server on a Ray of its own: `ray start`, `serve start`, `serve run`. It has keys of admins.

    Args:
        model: A directory.
        flags: Environment variables of Ray, Serve and the application.
        options: More of the form `name=value` for `serve_app:build_app`.
    """
    keys = [secrets.token_hex(16) for _ in range(KEYS)]
    # Short: Ray puts sockets below it, whose paths may have 107 bytes.
    with tempfile.TemporaryDirectory(prefix="vt-", ignore_cleanup_errors=True) as name:
        directory, port = Path(name), free_port()
        address = f"127.0.0.1:{free_port()}"
        env = _ray_environment(directory, address) | dict(flags or {})
        head = ["chrt", "--batch", "0"] if shutil.which("chrt") else []  # as `serve run` starts a Ray of its own
        head += [str(BIN / "ray"), "start", "--head", f"--port={address.split(':')[1]}", "--node-ip-address=127.0.0.1"]
        head += [f"--dashboard-port={free_port()}", f"--temp-dir={directory / 'ray'}", "--block"]
        head_log, serve_log = directory / "head.log", directory / "serve.log"
        run = [str(BIN / "serve"), "run", "serve_app:build_app", f"model={model}", "model_id=measured", *options]
        (directory / "keys").write_text("".join(f"admin@{OWNER}:{key}\n" for key in keys))
        run.append(f"api_keys_file={directory / 'keys'}")
        root = f"http://127.0.0.1:{port}"
        with child(head, env, head_log) as ray:
            until(lambda: "Ray runtime started" in head_log.read_text(errors="replace"), ray, head_log)
            start = [str(BIN / "serve"), "start", "--http-host=127.0.0.1", f"--http-port={port}"]
            with child(start, env, serve_log) as started:
                started.wait()
            with child(run, env, serve_log) as served:
                until(lambda: answers(f"{root}/health"), served, serve_log)
                yield Server(root, "measured", {"ignore_eos": True}, ray.pid, env, itertools.cycle(keys))


def _ray_environment(directory: Path, address: str) -> dict[str, str]:
    haproxy = directory / "haproxy"
    return {
        **RAY_ENVIRONMENT,  # as `serve run` starts a Ray of its own
        **os.environ,
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "RAY_ADDRESS": address,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),  # an earlier Ray on this machine may have left another
        "RAY_USAGE_STATS_ENABLED": "0",
        "HF_HUB_OFFLINE": "1",
        "VITRINE_HOME": str(directory / "home"),
        # Read only where HAProxy is on; by default two Rays on one machine would share these.
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(haproxy / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(haproxy / "admin.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(haproxy),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(haproxy / "server-state"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(haproxy / "metrics.sock"),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
    }


def missing() -> list[str]:
    """What `transformers serve` needs and is not installed: `pip install 'transformers[serving]'`."""
    return [package for package in NEEDED if importlib.util.find_spec(package) is None]


@contextlib.contextmanager
def transformers_serve(model: Path, *, options: Sequence[str] = (), threads: int) -> Iterator[Server]:
    """`transformers serve` with one model loaded.

    Args:
        model: A directory.
        options: More of its command line's.
        threads: torch's.
    """
    with tempfile.TemporaryDirectory(prefix="vt-") as name:
        port, log = free_port(), Path(name) / "log"
        command = [str(BIN / "transformers"), "serve", str(model), f"--port={port}", "--host=127.0.0.1", *options]
        env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)}
        with child(command, env, log) as process:
            root = f"http://127.0.0.1:{port}"
            until(lambda: answers(f"{root}/health"), process, log)
            yield Server(root, str(model), session=process.pid)
