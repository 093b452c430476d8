import asyncio
from typing import Any

import pytest
from fake_openai import FakeServer

from evals.client import ChatClient, RequestFailed, first_model, wait_healthy


def ask(server: FakeServer, question: str, retries: int = 2, timeout: float = 30) -> dict[str, Any]:
    async def chat() -> dict[str, Any]:
        client = ChatClient(server.base_url, timeout=timeout, retries=retries, parallel=1)
        try:
            return await client.chat({"model": "m", "messages": [{"role": "user", "content": question}]})
        finally:
            await client.close()

    return asyncio.run(chat())


@pytest.mark.parametrize("label", ["[busy]", "[flaky]", "[restart]", "[starting]"])
def test_a_busy_or_broken_server_is_asked_again(server: FakeServer, label: str) -> None:
    answer = ask(server, f"{label} What is 1 + 2?")
    assert answer["choices"][0]["message"]["content"].endswith("#### 3")
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    ("label", "reason"),
    [("[refused]", "HTTP 400: prompt is not to my liking"), ("[broken]", "HTTP 500: a fault of request 7")],
)
def test_what_would_fail_again_is_not_tried_again(server: FakeServer, label: str, reason: str) -> None:
    with pytest.raises(RequestFailed, match=reason):
        ask(server, f"{label} What is 1 + 2?")
    assert len(server.requests) == 1


def test_retries_end(server: FakeServer) -> None:
    with pytest.raises(RequestFailed, match="HTTP 503: no room .attempt 2 of 2"):
        ask(server, "[down] What is 1 + 2?", retries=1)
    assert len(server.requests) == 2


def test_an_answer_that_takes_too_long_is_asked_for_again(server: FakeServer) -> None:
    with pytest.raises(RequestFailed, match="no answer within 0.2 s.*attempt 2 of 2"):
        ask(server, "[wait] What is 1 + 2?", retries=1, timeout=0.2)
    assert len(server.requests) == 2
    server.release()


def test_a_server_that_is_away_is_a_failed_request() -> None:
    with FakeServer() as server:
        pass
    with pytest.raises(RequestFailed, match="ClientConnectorError: Cannot connect"):
        ask(server, "What is 1 + 2?", retries=0)


def test_the_first_model_is_the_servers_own_order(server: FakeServer) -> None:
    server.models = ["b/second", "a/first"]
    assert first_model(server.base_url) == "b/second"
    server.models = []
    with pytest.raises(RequestFailed, match="no model"):
        first_model(server.base_url)


def test_waiting_ends_when_the_server_is_healthy(server: FakeServer) -> None:
    server.healthy_after = 1
    wait_healthy(server.base_url, 30)
    assert server.checks == 2


def test_waiting_ends_with_the_last_answer(server: FakeServer) -> None:
    server.healthy_after = 9
    with pytest.raises(RequestFailed, match="not healthy within 0 s; last: HTTP 503: not yet"):
        wait_healthy(server.base_url, 0)
