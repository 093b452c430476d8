"""The record of a server that `--serve` started: its process, options and cluster."""

import socket
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import psutil
from pydantic import BaseModel, ConfigDict, ValidationError

from deployments.options import Options, home
from evals.config import EvalError


class Record(BaseModel):
    """What `serve_app.hosting` writes of a server that `--serve` started: its process, options and cluster."""

    model_config = ConfigDict(strict=True, hide_input_in_errors=True)  # a store's URI may hold a key

    pid: int
    created: float  # seconds since the epoch
    options: Options
    ray_address: str
    ray_auth_mode: str | None


def read_record(base_url: str, say: Callable[[str], None] = lambda _: None) -> Record | None:
    """What the server at a URL wrote of itself when `--serve` started it; None where no such process runs.

    Args:
        base_url: The server's.
        say: Called with what is wrong with an invalid file in the record's place.
    """
    path = record_path(base_url)
    try:
        record = Record.model_validate_json(path.read_bytes())
        # Else the number is another process's by now.
        return record if psutil.Process(record.pid).create_time() == record.created else None
    except (FileNotFoundError, psutil.NoSuchProcess):
        return None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        say(
            f"{path} is ignored, because it is not a record of a server that --serve started: "
            f"{where or 'all'}: {first['msg']}",
        )
        return None
    except (OSError, ValueError, OverflowError, psutil.Error) as error:
        say(f"{path} is ignored, because it cannot be read: {error}")
        return None


def record_path(base_url: str) -> Path:
    """The file of the record of the server at a URL."""
    host, port = place_of(base_url)
    try:
        address = socket.gethostbyname(host)
    except OSError as error:
        raise EvalError(f"--serve: {host} has no address: {error}") from error
    return home() / "servers" / f"{address}-{port}.json"


def place_of(base_url: str) -> tuple[str, int]:
    """The host and the port of a URL.

    Raises:
        EvalError: No server can be started at such a URL.
    """
    url = urlsplit(base_url)
    if url.scheme != "http" or url.path != "/v1" or not url.hostname:
        raise EvalError(f"--serve serves at an address like http://127.0.0.1:8000/v1, not at {base_url}")
    return url.hostname, 80 if url.port is None else url.port
