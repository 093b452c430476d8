"""A real server of S3's protocol, moto's, in this process; tests make some of its requests fail or wait."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

os.environ["MOTO_S3_DEFAULT_MAX_KEYS"] = "7"  # lists come in pages


class ObjectServer:
    """Serves at an address until `close`.

    Attributes:
        port: Where.
        requests: Method and path of each request, in order.
        fails: Decides by method and path whether a request is answered 503 instead.
    """

    def __init__(self, address: str = "127.0.0.1") -> None:
        self.requests: list[tuple[str, str]] = []
        self.fails: Callable[[str, str], bool] = lambda method, path: False
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._server = make_server(address, 0, self._answer, threaded=True, request_handler=_Handler)
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def _answer(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        self.requests.append((method, path))
        if not self.fails(method, path):
            return self._moto(environ, start)
        if environ.get("CONTENT_LENGTH") or environ.get("wsgi.input_terminated"):
            environ["wsgi.input"].read(*map(int, filter(None, [environ.get("CONTENT_LENGTH")])))
        start("503 Service Unavailable", [("Content-Length", "0")])
        return []

    @contextlib.contextmanager
    def holding(self, method: str, path: str) -> Iterator[threading.Event]:
        """Within, requests of a method whose path contains `path` wait for the end; gives what is set once one does."""
        reached, ends, fails = threading.Event(), threading.Event(), self.fails

        def held(*asked: str) -> bool:
            if asked[0] == method and path in asked[1]:
                reached.set()
                ends.wait()
            return fails(*asked)

        self.fails = held
        try:
            yield reached
        finally:
            self.fails = fails
            ends.set()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else each answer waits 40 ms for the client to confirm its head

    def log(self, *args: Any) -> None:
        pass
