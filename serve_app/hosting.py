"""Serves the app for another program: `python -m serve_app.hosting < plan.json`.

It joins the Ray cluster of `RAY_ADDRESS` or of this machine, or starts one. Once the model serves, it writes the
plan's record and runs until SIGTERM or SIGINT. At the end it removes only what it started.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import ray
from pydantic import BaseModel, ConfigDict
from ray import serve
from ray.serve.context import _get_global_client  # the only way to find out whether Serve runs, and its address

from deployments import __version__
from deployments.clusters import join
from deployments.errors import LoadError
from deployments.options import Options
from serve_app import build_app

APP = "default"


class ServePlan(BaseModel):
    """The application to serve and its address.

    Attributes:
        host: The address to listen at.
        port: The port.
        options: The operator's options.
        record: A file that describes the running server and names the process to end.
        attached: Whether the server ends when its standard input closes, and so with the program that started it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str
    port: int
    options: Options
    record: Path
    attached: bool


def main() -> int:
    """Serve the plan on standard input until a signal stops it."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    plan = ServePlan.model_validate_json(sys.stdin.readline())
    if plan.attached:
        threading.Thread(target=_end_with_starter, daemon=True).start()
    try:
        with _hosted(plan):
            while True:  # pause returns after each handled signal; those that end this raise
                signal.pause()
    except KeyboardInterrupt:
        pass
    except (ConnectionError, RuntimeError, LoadError) as error:
        print(error.message if isinstance(error, LoadError) else error, file=sys.stderr)
        return 1
    return 0


@contextmanager
def _hosted(plan: ServePlan) -> Iterator[None]:
    """The plan's server while the block runs."""
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    is_own = join()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # replaces the handler that Ray installed
    try:
        before = _get_global_client(raise_if_no_controller_running=False)
        if before is None:
            serve.start(http_options={"host": plan.host, "port": plan.port}, logging_config={"log_level": "WARNING"})
        elif (port := before.http_config.port) != plan.port:
            raise RuntimeError(f"Ray Serve runs in this cluster and listens at port {port}, not at {plan.port}")
        elif APP in serve.status().applications:
            raise RuntimeError(f"Ray Serve runs an application {APP!r} in this cluster already")
        try:
            _run(plan.options)
            _write_record(plan)
            yield
        finally:
            for stop in (signal.SIGTERM, signal.SIGINT):
                signal.signal(stop, signal.SIG_IGN)  # already stopping
            plan.record.unlink(missing_ok=True)
            if not is_own:
                _remove(before is None)
    finally:
        ray.shutdown()


def _run(options: Options) -> None:
    try:
        serve.run(build_app(options), name=APP)
    except RuntimeError as error:
        deployments = serve.status().applications[APP].deployments.values()
        reasons = [deployment.message for deployment in deployments if deployment.message]
        raise RuntimeError("\n".join([str(error), *reasons])) from error


def _remove(serve_too: bool) -> None:
    """Remove the application and the models that it loaded from a cluster that continues."""
    if serve_too:
        serve.shutdown()  # type: ignore[no-untyped-call]
        return
    for name in serve.status().applications:
        if name == APP or name.startswith(f"{APP}.models."):
            serve.delete(name)


def _write_record(plan: ServePlan) -> None:
    """Write atomically and readable only by this user: a store's URI may contain a key."""
    process, address = psutil.Process(), ray.get_runtime_context().gcs_address
    content = {
        "pid": process.pid,
        "created": process.create_time(),  # seconds since the epoch
        "version": __version__,
        "options": plan.options.model_dump(mode="json"),
        "ray": {"RAY_ADDRESS": address, "RAY_AUTH_MODE": os.environ.get("RAY_AUTH_MODE", "disabled")},
    }
    part = plan.record.with_suffix(f".{process.pid}")
    part.touch(mode=0o600)
    part.write_text(json.dumps(content))
    part.replace(plan.record)


def _end_with_starter() -> None:
    # Not through sys.stdin: a thread that reads it delays the interpreter's exit.
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)  # SIGINT may be ignored, as in background jobs of scripts


if __name__ == "__main__":
    sys.exit(main())
