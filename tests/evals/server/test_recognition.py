"""A server is known by what it says of itself, not by its 200."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

import evals.server.recognition as recognition
from evals.config import EvalError
from evals.server.recognition import NotReady, check_asked, look
from tests.waiting import EACH_S

keys: list[str | None] = []  # that the last server was sent


@contextmanager
def answering(pages: dict[str, Any], otherwise: tuple[int, str]) -> Iterator[str]:
    """The base URL of a server with these pages, and one answer to all else."""

    keys.clear()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            keys.append(self.headers.get("Authorization"))
            page = pages.get(self.path.partition("?")[0])
            status, body = (200, json.dumps(page)) if page is not None else otherwise
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(EACH_S,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1"
        finally:
            server.shutdown()
            thread.join()


def described(**info: str) -> dict[str, Any]:
    return {"info": {"title": "Vitrine", "version": "0.1.0"} | info}


HEALTH = {"status": "ok", "loaded_models": ["m"], "replicas": {"m": {"RUNNING": 1}}}
VITRINE = {"/openapi.json": described(), "/health": HEALTH}


def test_the_real_server_is_known_by_its_title_its_version_and_its_model(served: Any) -> None:
    found = look(served.base_url)
    assert found
    assert found.is_ready("vitrine-demo")
    check_asked(found, served.base_url, "vitrine-demo")
    with pytest.raises(EvalError, match="serves vitrine-demo, not another/model"):
        check_asked(found, served.base_url, "another/model")


def test_the_key_is_shown_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "s3cret")
    for other in ({}, VITRINE | {"/openapi.json": described(title="Another")}):
        with answering(other, (404, "no such page")) as url, pytest.raises(EvalError, match="is no Vitrine server"):
            look(url)
        assert set(keys) == {None}


def test_where_nothing_listens_there_is_nothing() -> None:
    with answering({}, (200, "")) as gone:
        pass
    assert look(gone) is None


def test_ray_serve_without_an_application_is_nothing() -> None:
    with answering({"/-/routes": {"/other": "other"}}, (200, "success")) as vacant:
        assert look(vacant) is None


def test_ray_serve_that_never_had_an_application_is_nothing() -> None:
    with answering({}, (503, "Route table is not populated yet.")) as vacant:
        assert look(vacant) is None


@pytest.mark.parametrize("body", ["", "ok", "{}", "[]", '{"status": "ok", "loaded_models": ["m"]}', "<html>"])
def test_a_stranger_that_answers_200_to_all_is_none(body: str) -> None:
    with (
        answering({}, (200, body)) as stranger,
        pytest.raises(EvalError, match=r"is no Vitrine server: /openapi\.json"),
    ):
        look(stranger)


def test_another_version_is_refused_with_both() -> None:
    pages = VITRINE | {"/openapi.json": described(version="9.9")}
    with answering(pages, (404, "")) as other:
        found = look(other)
        assert found
        with pytest.raises(EvalError, match=r"is Vitrine 9\.9, and the evaluator is"):
            check_asked(found, other, "m")


def test_a_model_that_still_loads_is_one_of_the_servers_but_not_ready() -> None:
    health = {"status": "unavailable", "loaded_models": [], "replicas": {"m": {"STARTING": 1}}}
    with answering(VITRINE | {"/health": health}, (404, "")) as loading:
        found = look(loading)
    assert found
    assert found.models == {"m"}
    assert not found.is_ready("m")


def test_a_server_that_cannot_say_yet_is_asked_again_later() -> None:
    with answering({}, (503, "no replica yet")) as starting, pytest.raises(NotReady, match="no replica yet"):
        look(starting)


def test_what_speaks_no_http_or_never_answers_is_a_stranger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recognition, "PATIENCE_S", 0.1)
    released = threading.Event()

    class Mute(BaseHTTPRequestHandler):
        def handle(self) -> None:
            released.wait()

    with ThreadingHTTPServer(("127.0.0.1", 0), Mute) as server:
        thread = threading.Thread(target=server.serve_forever, args=(EACH_S,))
        thread.start()
        with pytest.raises(EvalError, match=httpx.ReadTimeout.__name__):
            look(f"http://127.0.0.1:{server.server_port}/v1")
        released.set()
        server.shutdown()
        thread.join()
