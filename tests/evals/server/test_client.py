import asyncio
import socket
from collections.abc import Awaitable, Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from fake_openai import FakeServer
from fastapi.responses import JSONResponse

from evals.config import Config, EvalError
from evals.server import client
from evals.server.answers import AnswerLate, RequestFailed
from evals.server.client import ChatClient
from evals.server.recognition import FoundServer
from evals.server.server_process import wait
from evals.server.server_queries import first_model

Ask = Callable[[str], Awaitable[dict[str, Any]]]


class Time:
    """Seconds that pass by sleeping; `then` may do something when they have."""

    def __init__(self, then: Callable[[float], Awaitable[None]] | None = None, each: float = 0.0) -> None:
        self.now = 0.0
        self._each = each  # seconds that pass whenever the clock is looked at
        self.slept: list[float] = []
        self._then = then

    def clock(self) -> float:
        self.now += self._each
        return self.now

    async def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.slept.append(seconds)
        self.now += seconds
        await asyncio.sleep(0)
        if self._then:
            await self._then(self.now)


def question(text: str) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": f"{text} What is 1 + 2?"}]}


def content(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


async def with_client(base_url: str, use: Callable[[ChatClient], Awaitable[Any]], **options: Any) -> Any:
    asking = ChatClient(base_url, **{"timeout": 30, "retries": 2, "parallel": 8, "max_outage": 600.0} | options)
    try:
        return await use(asking)
    finally:
        await asking.close()


def ask(base_url: str, text: str, **options: Any) -> dict[str, Any]:
    answer: dict[str, Any] = asyncio.run(with_client(base_url, lambda client: client.chat(question(text)), **options))
    return answer


@pytest.mark.parametrize("label", ["[busy]", "[queued]", "[flaky]", "[restart]", "[starting]"])
def test_a_busy_or_broken_server_is_asked_again(server: FakeServer, label: str) -> None:
    assert content(ask(server.base_url, label, sleep=Time().sleep)).endswith("#### 3")
    assert len(server.requests) == 2


def test_requests_go_through_the_environments_proxy(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", f"http://user:password@127.0.0.1:{server.port}")
    assert content(ask("http://elsewhere.invalid/v1", "[right]")).endswith("#### 3")
    monkeypatch.setenv("no_proxy", "elsewhere.invalid")
    with pytest.raises(RequestFailed, match="Cannot connect to host elsewhere.invalid"):
        ask("http://elsewhere.invalid/v1", "[right]", max_outage=0.0)
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("label", "reason"),
    [("[refused]", "HTTP 400: prompt is not to my liking"), ("[broken]", "HTTP 500: a fault of request 7")],
)
def test_what_would_fail_again_is_not_tried_again(server: FakeServer, label: str, reason: str) -> None:
    with pytest.raises(RequestFailed, match=reason):
        ask(server.base_url, label)
    assert len(server.requests) == 1


def test_an_answer_that_takes_too_long_is_not_generated_again(server: FakeServer) -> None:
    with pytest.raises(AnswerLate, match="no answer within 1 s"):
        ask(server.base_url, "[wait]", retries=8, timeout=1)
    server.release()
    with pytest.raises(AnswerLate, match="HTTP 504: not done after the server's limit of 600 s"):
        ask(server.base_url, "[late]", retries=8)
    assert len(server.requests) == 2


def test_a_server_that_hangs_is_away_and_its_answer_not_late(server: FakeServer) -> None:
    server.closed = JSONResponse({"error": {"message": "no controller"}}, status_code=503)
    with pytest.raises(RequestFailed, match="no answer within 1 s, and none to /models; no usable answer") as failed:
        ask(server.base_url, "[wait]", timeout=1, max_outage=0.0)
    assert not isinstance(failed.value, AnswerLate)
    server.release()


async def fetched(client: ChatClient) -> bytes:
    return b"".join([part async for part in client.file_bytes("models", 0, 10)])


def test_bytes_of_a_file_that_take_too_long_are_asked_for_again(server: FakeServer) -> None:
    server.closed = JSONResponse({"error": {"message": "too slow"}}, status_code=504)
    with pytest.raises(RequestFailed, match=r"too slow \(attempt 3 of 3\)"):
        asyncio.run(with_client(server.base_url, fetched, sleep=Time().sleep))


def test_an_answer_without_the_bytes_that_were_asked_for_is_refused(server: FakeServer) -> None:
    with pytest.raises(RequestFailed, match="does not have the bytes of a file from 0 on"):
        asyncio.run(with_client(server.base_url, fetched))


@pytest.mark.parametrize(
    ("told", "least", "most"),
    [
        ("7", 7, 7),
        ("1e9", 600, 600),
        ("Wed, 21 Oct 2099 07:28:00 GMT", 600, 600),
        ("inf", 0.5, 1),
        ("nan", 0.5, 1),
        ("-5", 0.5, 1),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0.5, 1),
        ("soon", 0.5, 1),
    ],
)
def test_a_server_may_ask_to_wait_but_not_for_ever(server: FakeServer, told: str, least: float, most: float) -> None:
    server.retry_after, time = told, Time()
    ask(server.base_url, "[busy]", sleep=time.sleep)
    (waited,) = time.slept
    assert least <= waited <= most


def test_a_server_that_is_away_is_waited_for_whatever_the_retries_and_found_soon_after_its_return() -> None:
    with FakeServer() as gone:
        pass
    back: list[FakeServer] = []

    async def return_after_500_s(now: float) -> None:
        if now > 500 and not back:
            back.append(FakeServer(gone.port).__enter__())

    time = Time(return_after_500_s)
    try:
        answer = ask(gone.base_url, "", retries=0, max_outage=600.0, clock=time.clock, sleep=time.sleep)
    finally:
        for server in back:
            server.__exit__(None, None, None)
    assert content(answer).endswith("#### 3")
    assert time.now < 505
    assert max(time.slept) <= 4
    assert len(set(time.slept)) > 100  # with jitter: many clients do not come all at once


def test_requests_fail_after_one_attempt_once_nothing_usable_has_come_for_too_long(server: FakeServer) -> None:
    time = Time()

    async def use(client: ChatClient) -> list[BaseException]:
        first = await asyncio.gather(*(client.chat(question("[down]")) for _ in range(4)), return_exceptions=True)
        sleeps, requests = len(time.slept), len(server.requests)
        later = await asyncio.gather(*(client.chat(question("[down]")) for _ in range(4)), return_exceptions=True)
        assert (len(time.slept), len(server.requests)) == (sleeps, requests + 4)
        return [*first, *later]

    options = {"max_outage": 60.0, "clock": time.clock, "sleep": time.sleep}
    for failure in asyncio.run(with_client(server.base_url, use, **options)):
        assert isinstance(failure, RequestFailed)
        assert "HTTP 503: no room; no usable answer for 6" in str(failure)
        assert "(max_outage 60): --resume goes on when the server is back" in str(failure)
    assert 60 <= time.now < 70  # of all together: each sleeps for some of it


@pytest.mark.parametrize("label", ["", "[refused]", "[broken]"])
def test_an_answer_of_any_kind_to_any_request_ends_the_outage(server: FakeServer, label: str) -> None:
    async def use(client: ChatClient) -> None:
        async def another_asks(now: float) -> None:
            if 30 < now < 34:
                await asyncio.gather(client.chat(question(label)), return_exceptions=True)

        time._then = another_asks
        await client.chat(question("[down]"))

    time = Time()
    with pytest.raises(RequestFailed, match="no usable answer for 4") as failed:
        asyncio.run(with_client(server.base_url, use, max_outage=40.0, clock=time.clock, sleep=time.sleep, retries=9))
    assert "max_outage 40" in str(failed.value)
    assert 70 < time.now < 80


def test_a_request_that_breaks_its_connection_each_time_ends_while_others_are_answered(server: FakeServer) -> None:
    async def use(client: ChatClient) -> None:
        async def another_asks(now: float) -> None:
            await client.chat(question(""))

        time._then = another_asks
        await client.chat(question("[torn]"))

    time = Time()
    with pytest.raises(RequestFailed, match="attempt 3 of 3"):
        asyncio.run(with_client(server.base_url, use, retries=2, clock=time.clock, sleep=time.sleep))
    assert len(time.slept) == 3


@pytest.mark.parametrize("renewals", [0, 2, 5])
def test_a_connection_that_breaks_late_makes_an_outage_longer_and_not_for_ever(
    server: FakeServer, renewals: int
) -> None:
    time = Time(each=25.0)
    with pytest.raises(RequestFailed, match=r"no usable answer for \d+ s \(max_outage 60\)"):
        ask(server.base_url, "[torn]", max_outage=60.0, retries=renewals, clock=time.clock, sleep=time.sleep)
    assert renewals + 1 <= len(server.requests) <= renewals + 3


def test_an_outage_of_hours_is_waited_out(server: FakeServer) -> None:
    async def return_after_two_hours(now: float) -> None:
        server.up = now > 7200

    server.retry_after, time = "300", Time(return_after_two_hours)
    ask(server.base_url, "[down]", retries=0, max_outage=9999.0, clock=time.clock, sleep=time.sleep)
    assert 7200 < time.now < 7505


def test_a_second_outage_ends_in_time_whatever_the_server_asks_to_wait(server: FakeServer) -> None:
    async def use(client: ChatClient) -> None:
        async def another_asks(now: float) -> None:
            if now < 61:
                await client.chat(question(""))

        time._then = another_asks
        await client.chat(question("[down]"))

    server.retry_after, time = "600", Time()
    with pytest.raises(RequestFailed, match="no usable answer for 60 s"):
        asyncio.run(with_client(server.base_url, use, max_outage=60.0, clock=time.clock, sleep=time.sleep, retries=9))
    assert 120 <= time.now < 121


def test_an_absent_server_that_says_for_how_long_is_not_asked_sooner(server: FakeServer) -> None:
    server.retry_after, time = "25", Time()
    with pytest.raises(RequestFailed, match="no usable answer for 60 s"):
        ask(server.base_url, "[down]", max_outage=60.0, clock=time.clock, sleep=time.sleep)
    assert time.slept == pytest.approx([25, 25, 10], abs=0.1)  # but the outage ends in time


def test_a_machine_that_takes_no_connections_is_away_and_not_busy() -> None:
    with socket.socket() as deaf, socket.socket() as first, socket.socket() as second:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        for one in (first, second):  # fill its queue
            one.setblocking(False)
            one.connect_ex(deaf.getsockname())
        with pytest.raises(RequestFailed, match=r"Connection timeout.*no usable answer for 0 s"):
            ask(f"http://127.0.0.1:{deaf.getsockname()[1]}/v1", "", max_outage=0.0, retries=0, timeout=0.4)


def test_a_server_that_is_away_is_no_wait_where_none_is_wanted() -> None:
    with FakeServer() as server:
        pass
    with pytest.raises(RequestFailed, match="ClientConnectorError: Cannot connect.*no usable answer for 0 s"):
        ask(server.base_url, "", max_outage=0.0)


def test_a_server_that_knows_no_max_tokens_is_asked_for_max_completion_tokens_from_then_on(server: FakeServer) -> None:
    server.modern = True

    async def use(client: ChatClient) -> list[str]:
        return [content(await client.chat(question(""))) for _ in range(2)]

    assert len(asyncio.run(with_client(server.base_url, use))) == 2
    limits = [{name: body[name] for name in body if name.startswith("max")} for body in server.requests]
    assert limits == [{"max_tokens": 9}, {"max_completion_tokens": 9}, {"max_completion_tokens": 9}]


def test_max_tokens_that_are_too_many_are_refused_and_not_asked_for_otherwise(server: FakeServer) -> None:
    with pytest.raises(RequestFailed, match="HTTP 400: max_tokens: too many"):
        ask(server.base_url, "[long]")
    assert len(server.requests) == 1


def test_an_answer_larger_than_what_may_be_in_memory_is_not_read_to_its_end(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "MOST_BYTES", 10)
    with pytest.raises(RequestFailed, match="the answer has more than"):
        ask(server.base_url, "")


def test_the_first_model_is_the_servers_own_order(server: FakeServer) -> None:
    server.models = ["b/second", "a/first"]
    assert first_model(server.base_url) == "b/second"
    server.models = []
    with pytest.raises(RequestFailed, match="no model"):
        first_model(server.base_url)


def waited_for(server: FakeServer, results: Path, limit_s: float) -> FoundServer | None:
    return wait(Config(base_url=server.base_url, session_id="s", results_dir=results), limit_s, "")


def test_waiting_ends_when_the_server_is_healthy(server: FakeServer, tmp_path: Path) -> None:
    server.healthy_after = 1
    found = waited_for(server, tmp_path, 30)
    assert found
    assert found.loaded == {"fake/model"}
    assert server.checks == 2


def test_waiting_ends_with_the_last_answer(server: FakeServer, tmp_path: Path) -> None:
    server.healthy_after = 9
    with pytest.raises(EvalError, match=r"not healthy within 0 s: .*/health: HTTP 503: 'not yet'"):
        waited_for(server, tmp_path, 0)
    server.healthy_after, server.models = 0, []
    with pytest.raises(EvalError, match="not healthy within 0 s: no model is loaded"):
        waited_for(server, tmp_path, 0)


def test_a_proxy_that_answers_before_the_server_does_is_waited_out(tmp_path: Path) -> None:
    class Proxy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(502)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as proxy:
        Thread(target=proxy.serve_forever, daemon=True).start()
        config = Config(base_url=f"http://127.0.0.1:{proxy.server_port}/v1", session_id="s", results_dir=tmp_path)
        with pytest.raises(EvalError, match=r"not healthy within 0 s: .*HTTP 502"):
            wait(config, 0, "")
        proxy.shutdown()
