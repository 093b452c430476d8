"""The process that parses large bodies: reads them one after another from its standard input and calls `parsed`.

It runs as a script with its memory limit as argument. It imports only the schemas and the parser, because the package
itself imports Ray.
"""

from __future__ import annotations

import importlib
import os
import pickle
import resource
import struct
import sys
from pathlib import Path
from types import ModuleType
from typing import IO, Any

SIZES = struct.Struct("<QQ")  # bytes of the pickled kind's name and `Below`, and of the body
SIZE = struct.Struct("<Q")  # bytes of the answer


def without_ray(package: str) -> None:
    """Make the package's modules importable without running its `__init__`."""
    module = ModuleType(package)
    module.__path__ = [str(Path(__file__).parents[1])]
    sys.modules[package] = module


def answer(asked: bytes, raw: bytes) -> bytes:
    """The pickled object, or the `RequestError` with the reason."""
    from deployments.errors import RequestError
    from serve_app.http.parsing import parsed

    module, kind, below = pickle.loads(asked)  # noqa: S301, of the server
    try:
        found: Any = parsed(getattr(importlib.import_module(module), kind), raw, below)
    except RequestError as error:
        found = error
    return pickle.dumps(found, pickle.HIGHEST_PROTOCOL)


def serve(asked: IO[bytes], answered: IO[bytes]) -> None:
    """Answer until the input ends."""
    while head := asked.read(SIZES.size):
        wanted, raw = (asked.read(size) for size in SIZES.unpack(head))
        result = answer(wanted, raw)
        answered.write(SIZE.pack(len(result)) + result)
        answered.flush()


if __name__ == "__main__":
    os.nice(10)  # short requests take precedence
    most, (_, hard) = int(sys.argv[1]), resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    without_ray("serve_app")
    serve(sys.stdin.buffer, sys.stdout.buffer)
