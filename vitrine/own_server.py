"""Servers that a program starts on this machine and stops."""

from __future__ import annotations

import atexit
import contextlib
import errno
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vitrine.server import AsyncServer, Server, connect

HOST = "127.0.0.1"
LOOK_S = 0.2
STOP_S = 120.0  # for the server's running requests
LINES = 20  # of the log, if the server does not start


class StartError(RuntimeError):
    """A server ended before its model was loaded, or was too slow; the text has the end of its log."""


class OwnServer(Server):
    """A server that `serve` started; `close` stops it."""

    def __init__(self, asynchronous: AsyncServer, running: contextlib.ExitStack) -> None:
        super().__init__(asynchronous)
        self._running = running
        atexit.register(self.close)

    def close(self) -> None:
        """Close the connections and stop the server."""
        atexit.unregister(self.close)
        super().close()
        self._running.close()


def serve(model: str = "vitrine-demo", *, timeout: float = 600, **options: Any) -> Server:
    """Start a server on a free port of this machine; it stops with the program or by `close`.

    Args:
        model: A model by any of the names of docs/models.md, such as `smollm2` or `Qwen/Qwen3-0.6B`.
        timeout: Seconds for loading the model.
        options: The server's options, as in deployments/options.py, such as `dtype="float32"`.

    Raises:
        ImportError: The server's packages are not installed.
        RuntimeError: The server ended before the model was loaded, or was too slow; has the end of its log.

    Examples:
        >>> server = vitrine.serve("vitrine-demo", allow_client_code=True)
        >>> server.model
        'vitrine-demo'
    """
    if getattr(find_spec("ray"), "origin", None) is None:  # a directory of that name is not Ray
        raise ImportError(
            "the server is not installed: in Vitrine's clone, pip install -c constraints.txt -e '.[serve]'"
        )
    with contextlib.ExitStack() as running:
        directory = Path(running.enter_context(tempfile.TemporaryDirectory(prefix="vitrine-")))
        plan = {"host": HOST, "port": free_port(), "options": {"model": model, **options}}
        plan |= {"record": str(directory / "record"), "attached": True}
        running.enter_context(hosted(plan, directory / "log", timeout, RAY_ADDRESS="local"))  # a Ray of its own
        return OwnServer(connect(f"http://{HOST}:{plan['port']}").asynchronous, running.pop_all())


@contextlib.contextmanager
def hosted(plan: Mapping[str, Any], log: Path, timeout: float, **env: str) -> Iterator[dict[str, Any]]:
    """A process of `serve_app.hosting` while the block runs, and longer if it is not attached; gives its record.

    Args:
        plan: The fields of `serve_app.hosting.ServePlan`.
        log: The file to which its output is appended.
        timeout: Seconds for loading the model.
        env: Defaults for variables of its environment.

    Raises:
        StartError: It ended before the model was loaded, or was too slow.
    """
    record = Path(plan["record"])
    record.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    record.unlink(missing_ok=True)  # of a server that was here before
    with log.open("a") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "serve_app.hosting"],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            text=True,
            env={**env, **os.environ},
            start_new_session=True,  # Ctrl-C then reaches only this program, which stops the server
        )
    assert process.stdin
    stays = False
    try:
        process.stdin.write(json.dumps(plan) + "\n")  # not an argument: an option may contain a key
        process.stdin.flush()
        content = _loaded(process, record, log, timeout)
        stays = not plan["attached"]
        yield content
    finally:
        if not stays:
            _stop(process)
        process.stdin.close()


def _loaded(process: subprocess.Popen[str], record: Path, log: Path, timeout: float) -> dict[str, Any]:
    """The record, as soon as the server has written it."""
    end = time.monotonic() + timeout
    while True:
        with contextlib.suppress(FileNotFoundError):
            content: dict[str, Any] = json.loads(record.read_bytes())
            return content
        if process.poll() is not None:
            raise StartError(f"the server ended with status {process.returncode}{tail(log)}")
        if time.monotonic() > end:
            raise StartError(f"the model was not loaded within {timeout:g} s{tail(log)}")
        time.sleep(LOOK_S)


def _stop(process: subprocess.Popen[str]) -> None:
    """End a server and everything that it started."""
    process.terminate()  # closing its input is not enough: a forked child of the program may keep it open
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def tail(log: Path) -> str:
    """The last lines of a server's log, as the end of a message."""
    return "\n".join(["; the end of its log:", *log.read_text(errors="replace").splitlines()[-LINES:]])


def free_port(host: str = HOST) -> int:
    """A free port of this machine, below the system's range for connections.

    The server starts to listen seconds later, when a connection may have taken a port of that range.

    Raises:
        OSError: The host is not an address of this machine.
    """
    while True:
        port = random.randrange(20_000, 30_000)
        try:
            with socket.socket() as probe:
                probe.bind((host, port))
            return port
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
