"""A real server of S3's protocol on this machine, and a proxy in front of it that fails some requests."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import os
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator

from tests.waiting import until
from vitrine.own_server import free_port


@contextlib.contextmanager
def object_server() -> Iterator[int]:
    """Starts moto's server in a process of its own; gives its port."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    env = os.environ | {"MOTO_S3_DEFAULT_MAX_KEYS": "7"}  # lists come in pages
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env)
    try:
        until(lambda: _answers(server, port))
        yield port
    finally:
        server.terminate()
        server.wait()


def _answers(server: subprocess.Popen[bytes], port: int) -> bool:
    assert server.poll() is None, "moto's server has ended"
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/moto-api/data.json", timeout=10).close()
    except OSError:
        return False
    return True


class Proxy:
    """Stands before a server.

    Attributes:
        port: Its own.
        requests: Method and path of each request, in order.
        fails: Decides by method and path whether a request is answered 503 instead.
        cuts: The same of connections that break off in the middle of the answer.
        drops: The same of those that break off in the middle of the request, which the server then never gets.
        sent: Bytes of answers.
    """

    def __init__(self, port: int) -> None:
        self.requests: list[tuple[str, str]] = []
        self.fails: Callable[[str, str], bool] = lambda method, path: False
        self.cuts: Callable[[str, str], bool] = lambda method, path: False
        self.drops: Callable[[str, str], bool] = lambda method, path: False
        self.sent = 0
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # else each answer waits 40 ms for the client to confirm its head

            def do_GET(self) -> None:
                proxy.requests.append((self.command, self.path))
                if proxy.drops(self.command, self.path):
                    self.rfile.read(64 << 10)
                    self.close_connection = True
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                body = self._body()
                if proxy.fails(self.command, self.path):
                    self.send_response(503)
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                server = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
                hops = ("transfer-encoding", "content-length", "expect", "connection")
                headers = {name: value for name, value in self.headers.items() if name.lower() not in hops}
                server.request(self.command, self.path, body, headers | {"Content-Length": str(len(body))})
                answer = server.getresponse()
                content = answer.read()
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                        self.send_header(name, value)
                length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(content))
                self.send_header("Content-Length", length or "0")
                self.end_headers()
                if proxy.cuts(self.command, self.path):
                    self.wfile.write(content[: len(content) // 2])
                    self.close_connection = True
                    self.connection.shutdown(socket.SHUT_RDWR)
                    server.close()
                    return
                proxy.sent += len(content)
                self.wfile.write(content)
                server.close()

            def _body(self) -> bytes:
                if self.headers.get("Transfer-Encoding") != "chunked":
                    return self.rfile.read(int(self.headers.get("Content-Length") or 0))
                body = b""
                while size := int(self.rfile.readline(), 16):
                    body += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
                return body

            do_PUT = do_POST = do_DELETE = do_HEAD = do_GET

            def log_message(self, *args: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

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
