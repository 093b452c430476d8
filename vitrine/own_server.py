"""A server that runs as long as the program that started it."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vitrine.server import AsyncServer, Server, connect

HOST = "127.0.0.1"
LOOK_S = 0.2
STOP_S = 120.0  # for the server's running requests
LINES = 20  # of the log, if the server does not start


class OwnServer(Server):
    """A server that `serve` started; `close` stops it."""

    def __init__(self, asynchronous: AsyncServer, process: subprocess.Popen[str], directory: Path) -> None:
        super().__init__(asynchronous)
        self._process = process
        self._directory = directory
        atexit.register(self.close)

    def close(self) -> None:
        """Close the connections and stop the server."""
        atexit.unregister(self.close)
        if self._process.poll() is None:
            super().close()
            _stop(self._process)
        shutil.rmtree(self._directory, ignore_errors=True)


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
    directory = Path(tempfile.mkdtemp(prefix="vitrine-"))
    process, port = _started({"model": model, **options}, directory)
    try:
        _wait(process, directory, timeout)
        return OwnServer(connect(f"http://{HOST}:{port}").asynchronous, process, directory)
    except BaseException:  # also Ctrl-C: stop the server, then re-raise
        _stop(process)
        shutil.rmtree(directory, ignore_errors=True)
        raise


def free_port() -> int:
    """A free port of this machine, below the system's range for connections.

    The server starts to listen seconds later, when a connection may have taken a port of that range.
    """
    while True:
        port = random.randrange(20_000, 30_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            return port


def _started(options: dict[str, Any], directory: Path) -> tuple[subprocess.Popen[str], int]:
    """Start a process that serves until its standard input closes, with its own Ray; return it and its port."""
    port = free_port()
    plan = {"host": HOST, "port": port, "options": options, "record": str(directory / "record"), "attached": True}
    with (directory / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "serve_app.hosting"],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            text=True,
            env={"RAY_ADDRESS": "local", **os.environ},
            start_new_session=True,  # Ctrl-C then reaches only this program, which stops the server
        )
    assert process.stdin
    process.stdin.write(json.dumps(plan) + "\n")  # not an argument: an option may contain a key
    process.stdin.flush()
    return process, port


def _wait(process: subprocess.Popen[str], directory: Path, timeout: float) -> None:
    """Wait until the server has written its record, after its model is loaded."""
    end = time.monotonic() + timeout
    while not (directory / "record").exists():
        ended = process.poll() is not None
        if ended or time.monotonic() > end:
            lines = (directory / "log").read_text(errors="replace").splitlines()[-LINES:]
            what = (
                f"the server ended with {process.returncode}" if ended else f"the model was not there in {timeout:g} s"
            )
            raise RuntimeError("\n".join([f"{what}; the end of its log:", *lines]))
        time.sleep(LOOK_S)


def _stop(process: subprocess.Popen[str]) -> None:
    """End a server and everything that it started."""
    process.terminate()  # closing its input is not enough: a forked child of the program may keep it open
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    finally:
        assert process.stdin
        process.stdin.close()
