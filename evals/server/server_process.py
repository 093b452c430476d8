"""The server of `--serve`: one that an earlier `--serve` left is used, else one is started and stopped."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from socket import gethostbyname
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import ray
from ray._raylet import Config as RayConfig  # type: ignore[attr-defined]

from deployments import __version__
from deployments.options import home
from evals.config import Config, EvalError
from vitrine.own_server import StartError, free_port, hosted, tail

LOG = "server.log"
START_S = 600.0  # the longest that a server may take to start
ANSWER_S = 10.0

Record = dict[str, Any]  # what `serve_app.hosting` writes when a model is loaded: its process, options and cluster


@contextmanager
def serving(config: Config) -> Iterator[Config]:
    """The server that a run asks for, while the block runs; gives the run's options with its port and its model.

    A server that an earlier run left there with the same options is used, and left there. Without `serve` this does
    nothing.

    Raises:
        EvalError: Something else is there, or the server did not start; with the reason and the end of its log.
    """
    if not config.serve:
        yield config
        return
    host, port, path = _place(config)
    config = config.model_copy(update={"base_url": f"http://{host}:{port}/v1", "model": config.served.served_name})
    if record := _left(config, path):
        _say(f"using the server at {config.base_url}: Vitrine {__version__} with {config.serve}")
        with _joined(record):
            yield config
        return
    config.results_dir.mkdir(parents=True, exist_ok=True)
    log = config.results_dir / LOG
    plan = {"host": host, "port": port, "options": config.served.model_dump(mode="json")}
    plan |= {"record": str(path), "attached": not config.keep_running}
    _say(f"starting {config.serve} at {config.base_url}; its log is {log}")
    began = time.monotonic()
    try:
        with hosted(plan, log, START_S) as record:
            _say(f"healthy after {time.monotonic() - began:.0f} s")
            try:
                with _joined(record):
                    yield config
            finally:
                how_to_stop = f"{config.serve} still runs at {config.base_url}; stop it with: kill {record['pid']}"
                _say(how_to_stop if config.keep_running else "stopping the server")
    except StartError as error:
        raise EvalError(str(error)) from error


def tail_of(config: Config) -> str:
    """The end of the log of the server that a run has started, as the end of a message; else nothing."""
    log = config.results_dir / LOG
    return tail(log) if config.serve and log.exists() else ""


def _place(config: Config) -> tuple[str, int, Path]:
    """The host and the port of the server, a free one in the place of port 0; and the file of its record."""
    url, model = urlsplit(config.base_url), config.served.served_name
    if url.scheme != "http" or url.path != "/v1" or not url.hostname:
        raise EvalError(f"--serve serves at an address like http://127.0.0.1:8000/v1, not at {config.base_url}")
    if config.model not in ("", model):
        raise EvalError(f"--serve serves {model}, but --model is {config.model}")
    try:
        free, address = free_port(url.hostname), gethostbyname(url.hostname)
    except OSError as error:
        raise EvalError(f"--serve: {url.hostname} is not an address of this machine: {error}") from error
    port = 80 if url.port is None else url.port or free
    return url.hostname, port, home() / "servers" / f"{address}-{port}.json"


def _left(config: Config, path: Path) -> Record | None:
    """The record of a server that an earlier run left at the address; None where nothing is.

    Raises:
        EvalError: Something else is there.
    """
    record = _read(path)
    if record is None:
        if answer := _answer_at(config.base_url):
            answer = f"{config.base_url} answers ({answer}), but --serve did not start that server"
            raise EvalError(f"{answer}: leave --serve out to use it, or give another --base-url")
        return None
    asked = {"version": __version__, **config.served.model_dump(mode="json")}
    given = {"version": record.get("version"), **record["options"]}
    if differing := ", ".join(f"{name} is {value!r}" for name, value in given.items() if value != asked.get(name)):
        raise EvalError(f"{config.base_url} was started with other options: {differing}; stop it: kill {record['pid']}")
    return record


def _read(path: Path) -> Record | None:
    """The record of a server whose process runs; else None."""
    try:
        record: Record = json.loads(path.read_bytes())
        # Else the number is another process's by now.
        return record if psutil.Process(record["pid"]).create_time() == record["created"] else None
    except (OSError, ValueError, psutil.Error):
        return None


def _answer_at(base_url: str) -> str:
    """What answers at an address; empty if nothing does, or only Ray Serve without an application there."""
    try:
        # Without the key, which what listens there must not see.
        answer = httpx.get(f"{base_url.removesuffix('/v1')}/health", timeout=ANSWER_S)
    except httpx.ConnectError:
        return ""
    except httpx.HTTPError as error:
        return type(error).__name__
    is_vacant = answer.text.startswith(("Path '/health' not found.", "Route table is not populated yet."))
    return "" if is_vacant else f"HTTP {answer.status_code}: {answer.text[:100]!r}"


@contextmanager
def _joined(record: Record) -> Iterator[None]:
    """In the block, what joins a Ray cluster joins the server's."""
    os.environ.update(record["ray"])
    RayConfig.initialize("")  # it read the variables when Ray was imported
    try:
        yield
    finally:
        ray.shutdown()  # a cluster that ends takes its drivers with it


def _say(text: str) -> None:
    print(f"evals.gsm8k: {text}", flush=True)
