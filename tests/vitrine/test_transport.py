"""The client if a server is busy, away, late or rejects."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import numpy as np
import pytest

import vitrine
from tests.waiting import EACH_S
from vitrine.connection import transport
from vitrine.server_error import ServerError

MODELS = (200, {"data": [{"id": "first"}, {"id": "second"}]})
TEXT = (200, {"choices": [{"index": 0, "text": "yes"}]})


NO_REPLICA = {"error": {"message": "no replica answered", "code": "unavailable"}}
NOT_STARTED = {"error": {"message": "it waited for 600 s", "code": "not_started"}}
OPENAI = {"error": {"message": "no", "param": None, "code": "some_code"}}
BROKEN = httpx.RemoteProtocolError("the connection broke")


def refusal(status: int, message: str = "no", param: str | None = None) -> tuple[int, dict[str, object]]:
    return status, {"error": {"message": message, "param": param, "code": "some_code"}}


@pytest.fixture
def scripted() -> Iterator[Callable[..., str]]:
    """`scripted(answer, ...)`: the address of a server that gives these answers in turn, the last one for ever."""
    servers = []

    def start(*answers: tuple[int, dict[str, object]]) -> str:
        left = list(answers)

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                status, body = left.pop(0) if len(left) > 1 else left[0]
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.send_header("Content-Type", "application/json")
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


def test_a_server_that_stays_busy_is_an_error_with_its_words(scripted, passing):
    server = vitrine.connect(scripted(MODELS, refusal(429, "the queue is full")), timeout=100)
    with server, pytest.raises(vitrine.ServerError, match="the queue is full") as raised:
        server.generate("so?")
    assert (raised.value.status, raised.value.code) == (429, "some_code")


def test_a_refusal_names_its_field_and_is_not_asked_again(scripted):
    server = vitrine.connect(scripted(MODELS, refusal(400, "too hot", "temperature"), TEXT))
    with server, pytest.raises(vitrine.ServerError, match="^HTTP 400: temperature: too hot$") as raised:
        server.generate("so?", temperature=9)
    assert (raised.value.status, raised.value.param) == (400, "temperature")


def test_a_message_that_begins_with_its_field_names_it_once(scripted):
    server = vitrine.connect(scripted(MODELS, refusal(400, "capture.tokens: none", "capture.tokens")))
    with server, pytest.raises(vitrine.ServerError, match="^HTTP 400: capture.tokens: none$"):
        server.generate("so?")


def test_a_prompt_is_named_by_its_place_in_the_callers_list(scripted):
    server = vitrine.connect(scripted(MODELS, refusal(400, "prompt[0]: there is no text", "capture.tokens.text")))
    with server, pytest.raises(vitrine.ServerError, match=r"prompt\[1\]: there is no text"):
        server.generate(["a longer one", "short"])


def test_only_so_many_sequences_are_asked_for_at_once(monkeypatch):
    running, most = 0, 0

    async def answer(self, method, path, content=b"", **_):
        nonlocal running, most
        if method == "GET":
            return httpx.Response(200, json=MODELS[1])
        count = len(json.loads(content)["prompt"])
        running, most = running + count, max(most, running + count)
        await asyncio.sleep(0)
        running -= count
        return httpx.Response(200, json={"choices": [{"index": i, "text": "yes"} for i in range(count)]})

    monkeypatch.setattr(transport.Transport, "_exchange", answer)
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
    with pytest.raises(vitrine.ServerError, match="Not Found.*without OpenAI's error object"):
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


# ---- when a request is sent again


class Time:
    """Seconds that pass by sleeping; `then` is called after each sleep."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []
        self.then: Callable[[], Awaitable[object]] | None = None

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
        if self.then:
            await self.then()


@pytest.fixture
def passing(monkeypatch) -> Time:
    time = Time()
    monkeypatch.setattr(transport, "_now", lambda: time.now)
    monkeypatch.setattr(transport, "_sleep", time.sleep)
    return time


Answer = tuple[int, object] | Exception


@pytest.fixture
def sending(monkeypatch, passing) -> Callable[..., list[str]]:
    """`sending(method, answer, ..., **options)`: the paths of a request's attempts, each with the next answer.

    The last answer is for ever; `options` are the client's, and `repeat`.
    """

    def send(method: str, *answers: Answer, repeat: bool = True, **options: object) -> list[str]:
        left, paths = list(answers), list[str]()

        async def exchange(self, method, path, **_):
            paths.append(path)
            answer = left.pop(0) if len(left) > 1 else left[0]
            if isinstance(answer, Exception):
                raise answer
            return response(*answer)

        monkeypatch.setattr(transport.Transport, "_exchange", exchange)
        client = transport.Transport("http://server/v1", None, 60, **{"retries": 2, "max_outage": 600.0} | options)
        sent = client.get("/it", repeat=repeat) if method == "GET" else client.post("/it", {}, repeat=repeat)
        try:
            assert asyncio.run(sent) == {"it": 1}
        finally:
            send.paths = paths
        return paths

    return send


def response(status: int, body: object = None, **headers: str) -> httpx.Response:
    told = {"text": body} if isinstance(body, str) else {"json": body or {"it": 1}}
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.Response(status, **told, headers=given, request=httpx.Request("GET", "http://server/v1/it"))


@pytest.mark.parametrize("body", ["", "[]", "null", '"text"', '{"error": "text"}', '{"error": null}', "{"])
def test_a_body_that_is_not_openais_is_shown_as_it_is(body):
    assert body in str(vitrine.ServerError.of(response(500, body)))


@pytest.mark.parametrize(
    "hindrance",
    [
        *((status, OPENAI) for status in (408, 429, 502, 503)),
        *((status, "<html>") for status in (429, 502, 503, 504)),
        (504, NOT_STARTED),
        (504, NO_REPLICA),
        (404, "Path '/' not found"),
        (500, "Internal Server Error"),
        BROKEN,
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_busy_or_absent_server_is_asked_again(sending, method, hindrance):
    assert len(sending(method, hindrance, hindrance, (200, None))) == 3


@pytest.mark.parametrize("answer", [*((status, OPENAI) for status in (400, 401, 404, 500)), (403, "no")])
def test_a_request_that_would_fail_again_is_not_sent_again(sending, passing, answer):
    with pytest.raises(vitrine.ServerError):
        sending("POST", answer)
    assert passing.slept == []


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ((429, OPENAI), None),
        ((503, OPENAI), vitrine.ServerError),
        ((503, ""), ConnectionError),
        (BROKEN, ConnectionError),
    ],
)
def test_a_request_that_must_not_be_repeated_is_sent_again_only_if_it_was_not_begun(sending, answer, error):
    with pytest.raises(error) if error else contextlib.nullcontext():
        sending("POST", answer, (200, None), repeat=False)
    assert len(sending.paths) == (1 if error else 2)


def test_an_answer_that_takes_too_long_is_not_generated_again(sending, passing):
    late = httpx.ReadTimeout("")
    with pytest.raises(TimeoutError, match="no answer within 60 s"):
        sending("POST", late, (200, None))
    with pytest.raises(TimeoutError, match="HTTP 504: no"):
        sending("POST", (504, OPENAI))
    assert passing.slept == []
    assert sending("GET", late, (200, None)) == ["/it", "/models", "/it"]


def test_a_server_that_hangs_is_away_and_its_answer_not_late(sending):
    with pytest.raises(ConnectionError, match="no answer within 60 s, and none to /models"):
        sending("POST", httpx.ReadTimeout(""), max_outage=0.0)


@pytest.mark.parametrize(
    ("told", "least", "most"),
    [
        ("7", 7, 7),
        ("1e9", 600, 600),
        ("Wed, 21 Oct 2099 07:28:00 GMT", 600, 600),
        *((told, 0, 0) for told in ("inf", "nan", "-5", "Wed, 21 Oct 2015 07:28:00 GMT", "soon", "")),
    ],
)
def test_a_server_may_ask_to_wait_but_not_for_ever(told, least, most):
    assert least <= max(0, transport._retry_after_s(response(429, OPENAI, Retry_After=told))) <= most


def test_a_server_that_is_away_is_waited_for_whatever_the_retries(sending, passing):
    with pytest.raises(ConnectionError, match="the connection broke; waited 600 s"):
        sending("POST", BROKEN, retries=0)
    assert passing.now == pytest.approx(600, abs=1)
    assert max(passing.slept) <= 4
    assert len(set(passing.slept)) > 100  # with jitter: many clients do not come all at once


def test_an_outage_is_common_to_all_requests_and_ends_with_an_answer_of_any_kind(monkeypatch, passing):
    answers = {"/away": (503, "not yet"), "/other": (400, OPENAI)}

    async def exchange(self, method, path, **_):
        return response(*answers[path])

    async def another():
        if 30 < passing.now < 34:
            with contextlib.suppress(vitrine.ServerError):
                await client.get("/other")

    async def both():
        return await asyncio.gather(client.get("/away"), client.get("/away"), return_exceptions=True)

    monkeypatch.setattr(transport.Transport, "_exchange", exchange)
    client = transport.Transport("http://server/v1", None, 60, retries=9, max_outage=40.0)
    passing.then = another
    first = asyncio.run(both())
    assert all("HTTP 503: not yet" in str(error) and isinstance(error, ConnectionError) for error in first)
    assert 70 < passing.now < 80  # each sleeps for some of it
    slept = len(passing.slept)
    assert all(isinstance(error, ConnectionError) for error in asyncio.run(both()))
    assert len(passing.slept) == slept  # after it, requests fail after one attempt


def test_a_request_that_always_breaks_its_connection_ends_while_others_are_answered(monkeypatch, passing):
    async def exchange(self, method, path, **_):
        if path == "/torn":
            raise BROKEN
        return response(200)

    monkeypatch.setattr(transport.Transport, "_exchange", exchange)
    client = transport.Transport("http://server/v1", None, 60, retries=2, max_outage=600.0)
    passing.then = lambda: client.get("/other")
    with pytest.raises(ConnectionError):
        asyncio.run(client.get("/torn"))
    assert len(passing.slept) == 3


def test_bytes_of_a_file_are_those_that_were_asked_for(monkeypatch):
    async def exchange(self, method, path, **_):
        return response(206, "text", Content_Range="bytes 4-7/100")

    async def fetched(first):
        client = transport.Transport("http://server/v1", None, 60)
        return [page async for page in client.file_bytes("/file", first, 8)]

    monkeypatch.setattr(transport.Transport, "_exchange", exchange)
    assert asyncio.run(fetched(4)) == [b"text"]
    with pytest.raises(vitrine.ServerError, match="does not have the file's bytes from 0 on"):
        asyncio.run(fetched(0))


def test_requests_go_through_the_environments_proxy(scripted, monkeypatch):
    monkeypatch.setenv("http_proxy", scripted(MODELS).removesuffix("/v1"))
    assert vitrine.connect("http://elsewhere.invalid").model == "first"
    monkeypatch.setenv("no_proxy", "elsewhere.invalid")
    with pytest.raises(ConnectionError):
        vitrine.connect("http://elsewhere.invalid")


def test_errors_cross_processes_whatever_a_server_calls_its_field():
    error = copy.copy(ServerError("no", 400, "seed", "invalid_value"))  # as pickle does
    assert (str(error), error.status, error.param, error.code) == ("HTTP 400: seed: no", 400, "seed", "invalid_value")
    assert ServerError("no", 400, 7).param is None  # type: ignore[arg-type]


def test_a_key_that_no_header_holds_is_refused_and_not_shown():
    with pytest.raises(ValueError, match="^api_key: the key has spaces around it"):
        transport.Transport("http://server/v1", "secret ", 1)
