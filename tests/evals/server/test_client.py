import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from fake_openai import FakeServer

from evals.server.answers import RequestFailed
from evals.server.client import ChatClient
from evals.server.server_queries import first_model


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


def test_a_server_that_restarts_is_waited_for_and_one_that_stays_away_is_not_for_ever(server: FakeServer) -> None:
    assert content(ask(server.base_url, "[restart]")).endswith("#### 3")
    with pytest.raises(RequestFailed, match="does not answer: HTTP 503: no room"):
        ask(server.base_url, "[down]", max_outage=0.0)
    assert len(server.requests) == 3


def test_a_server_that_knows_no_max_tokens_is_asked_for_max_completion_tokens_from_then_on(server: FakeServer) -> None:
    server.modern = True

    async def use(client: ChatClient) -> list[str]:
        return [content(await client.chat(question(""))) for _ in range(2)]

    assert len(asyncio.run(with_client(server.base_url, use))) == 2
    limits = [{name: body[name] for name in body if name.startswith("max")} for body in server.requests]
    assert limits == [{"max_tokens": 9}, {"max_completion_tokens": 9}, {"max_completion_tokens": 9}]


def test_the_first_model_is_the_servers_own_order(server: FakeServer) -> None:
    server.models = ["b/second", "a/first"]
    assert first_model(server.base_url) == "b/second"
    server.models = []
    with pytest.raises(RequestFailed, match="no model"):
        first_model(server.base_url)
