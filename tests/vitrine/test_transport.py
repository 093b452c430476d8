"""The client if a server is busy, disconnects or rejects."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import numpy as np
import pytest

import vitrine
from tests.waiting import EACH_S
from vitrine.connection import transport

MODELS = (200, {"data": [{"id": "first"}, {"id": "second"}]})
TEXT = (200, {"choices": [{"index": 0, "text": "yes"}]})
DROPPED = (0, {})


def refusal(status: int, message: str = "no", param: str | None = None) -> tuple[int, dict[str, object]]:
    return status, {"error": {"message": message, "param": param, "code": "some_code"}}


@pytest.fixture
def scripted(monkeypatch) -> Iterator[Callable[..., str]]:
    """`scripted(answer, ...)`: the address of a server that gives these answers in turn, the last one for ever."""
    monkeypatch.setattr(transport, "LONGEST_PAUSE_S", 0)
    servers = []

    def start(*answers: tuple[int, dict[str, object]]) -> str:
        left = list(answers)

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                status, body = left.pop(0) if len(left) > 1 else left[0]
                if not status:
                    self.close_connection = True
                    return
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.send_header("Retry-After", "100")
                self.end_headers()
                self.wfile.write(data)

            do_POST = do_GET

            def log_message(self, *args: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(EACH_S,), daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}/v1"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("hindrances", [[refusal(429)], [refusal(503), refusal(503)], [DROPPED, refusal(429)]])
def test_a_busy_server_is_asked_again(scripted, hindrances):
    with vitrine.connect(scripted(MODELS, *hindrances, TEXT)) as server:
        assert server.generate("so?") == "yes"


def test_a_server_that_stays_busy_is_an_error_with_its_words(scripted):
    server = vitrine.connect(scripted(MODELS, refusal(429, "the queue is full")), timeout=1)
    with server, pytest.raises(vitrine.ServerError, match="the queue is full") as raised:
        server.generate("so?")
    assert (raised.value.status, raised.value.code) == (429, "some_code")


def test_a_refusal_names_its_field_and_is_not_asked_again(scripted):
    server = vitrine.connect(scripted(MODELS, refusal(400, "too hot", "temperature"), TEXT))
    with server, pytest.raises(vitrine.ServerError, match="^temperature: too hot$") as raised:
        server.generate("so?", temperature=9)
    assert (raised.value.status, raised.value.param) == (400, "temperature")


def test_a_message_that_begins_with_its_field_names_it_once(scripted):
    server = vitrine.connect(scripted(MODELS, refusal(400, "capture.tokens: none", "capture.tokens")))
    with server, pytest.raises(vitrine.ServerError, match="^capture.tokens: none$"):
        server.generate("so?")


def test_a_prompt_is_named_by_its_place_in_the_callers_list(scripted):
    server = vitrine.connect(scripted(MODELS, refusal(400, "prompt[0]: there is no text", "capture.tokens.text")))
    with server, pytest.raises(vitrine.ServerError, match=r"prompt\[1\]: there is no text"):
        server.generate(["a longer one", "short"])


def test_only_so_many_sequences_are_asked_for_at_once(monkeypatch):
    running, most = 0, 0

    async def answer(self, method, path, attempts=0, content=b"", **_):
        nonlocal running, most
        if method == "GET":
            return httpx.Response(200, json=MODELS[1])
        count = len(json.loads(content)["prompt"])
        running, most = running + count, max(most, running + count)
        await asyncio.sleep(0)
        running -= count
        return httpx.Response(200, json={"choices": [{"index": i, "text": "yes"} for i in range(count)]})

    monkeypatch.setattr(transport.Transport, "_answer", answer)
    with vitrine.connect() as server:
        assert server.generate(["so?"] * 3000) == ["yes"] * 3000
    assert transport.SEQUENCES_AT_ONCE - 64 < most <= transport.SEQUENCES_AT_ONCE


def test_numpys_numbers_and_ranges_are_sent_as_plain_ones(scripted):
    body = {"numbers": np.arange(2), "one": np.int64(3), "layers": range(2)}
    with vitrine.connect(scripted(MODELS, TEXT)) as server:
        assert server.generate("so?", logit_bias=body) == "yes"
        with pytest.raises(TypeError, match="cannot be sent"):
            server.generate("so?", stop={1, 2})


def test_a_stream_is_refused(scripted):
    with vitrine.connect(scripted(MODELS)) as server, pytest.raises(ValueError, match="use OpenAI's client"):
        server.complete("so?", stream=True)


def test_what_is_no_vitrine_server_is_named(scripted):
    with pytest.raises(vitrine.ServerError, match="is not a Vitrine server"):
        vitrine.connect(scripted((404, {"detail": "Not Found"})))


def test_a_server_that_is_not_there_is_told_at_once():
    with pytest.raises(ConnectionError, match="http://127.0.0.1:9 does not answer"):
        vitrine.connect("http://127.0.0.1:9")


def test_the_model_is_the_first_that_is_served_or_the_one_asked_for(scripted):
    url = scripted(MODELS)
    assert vitrine.connect(url).model == "first"
    assert vitrine.connect(url, model="second").model == "second"
    with pytest.raises(ValueError, match="serves first, second; third was asked for"):
        vitrine.connect(url, model="third")


def test_an_address_says_its_scheme():
    with pytest.raises(ValueError, match="does not begin with http"):
        vitrine.connect("localhost:8000")


@pytest.mark.long  # examples of docs/nnsight.md use both
@pytest.mark.parametrize(
    "order",
    ["import nnsight, vitrine; connect = vitrine.connect", "import vitrine; connect = vitrine.connect; import nnsight"],
)
def test_the_client_works_beside_nnsight(scripted, order):
    code = f"{order}; print(connect({scripted(MODELS)!r}).model, hasattr(object, 'save'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "first True\n", done.stderr
