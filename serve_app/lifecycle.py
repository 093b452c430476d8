"""Starting where another server may run, and stopping after the requests that run."""

from __future__ import annotations

import errno
import os
import signal
import socket
import threading
import time
from pathlib import Path
from types import FrameType

import psutil
from ray import serve
from ray._private import worker  # the only way to replace the signal handler that `ray.init` installs in `serve run`
from ray.serve.schema import ApplicationStatus

from deployments.activations.writer.recovery import open_directory
from deployments.options import Options

LOOK_S = 0.2


def check_free(host: str, port: int, options: Options) -> None:
    """Check that no other server has the port or the store, before anything starts.

    Ray Serve shares its port with any other server that does, and each would get a part of the requests.

    Raises:
        OSError: Another program listens at the port; names it.
        StoreError: Another server uses the store, or the disk refuses it.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # closed connections do not count
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            reason = f"{_listening(port)} listens at port {port} of {host}"
            raise OSError(f"{reason}: stop it, or use another port") from None
    os.close(open_directory(Path(options.activations_dir)))


def _listening(port: int) -> str:
    """The process that listens at a port of this machine, for an error."""
    for process in psutil.process_iter():
        try:
            addresses = [connection.laddr for connection in process.net_connections() if connection.status == "LISTEN"]
            if any(address.port == port for address in addresses):
                return f"process {process.pid} ({process.name()})"
        except psutil.Error:  # of another user, or ended
            continue
    return "another program"


def drain(app: str | None, grace_s: float) -> None:
    """Remove an application and its models from Serve, after the requests that run; None for all applications.

    New requests are rejected at once. After `grace_s` seconds this returns with what is left still running. It does not
    wait for models that are being loaded.
    """
    running, end = set(), time.monotonic() + grace_s
    for name, application in serve.status().applications.items():
        if app is None or name == app or name.startswith(f"{app}.models."):
            serve.delete(name, _blocking=False)
            if application.status == ApplicationStatus.RUNNING:
                running.add(name)
    while running & serve.status().applications.keys() and time.monotonic() < end:
        time.sleep(LOOK_S)


def drain_on_sigterm(grace_s: float) -> None:
    """Let `serve run` end by SIGTERM as by Ctrl-C, but after the requests that run, or at once by a second SIGTERM."""

    def stop() -> None:
        try:
            drain(None, grace_s)
        finally:  # also where Ray does not answer any more
            os.kill(os.getpid(), signal.SIGTERM)  # SIGINT may be ignored, as in background jobs of scripts

    def end(_number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # `stop` sends one more
        raise KeyboardInterrupt  # `serve run` then stops Serve and exits with 0

    def handle(_number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, end)
        threading.Thread(target=stop, daemon=True).start()

    worker._post_init_hooks.append(lambda: signal.signal(signal.SIGTERM, handle))
