"""Requests to the server: chat with retries, and the two questions asked before a run."""

import asyncio
import math
import os
import random
import time
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp
import httpx

RETRIED = {408, 429, 502, 503, 504}
TOLD = ("Content-Type", "Retry-After")  # headers that anything hangs on
LONGEST_TOLD = 600.0  # seconds that a server may ask to wait
LONGEST_WAIT = 30.0  # seconds between two attempts, unless the server names a time


class RequestFailed(Exception):
    """A request that has no answer, after its retries; the text says why."""


class ContextExceeded(RequestFailed):
    """The messages do not fit the model's context any more."""


class ChatClient:
    """One pool of connections to `base_url`, for one event loop."""

    def __init__(self, base_url: str, *, timeout: float, retries: int, parallel: int) -> None:
        """Opens nothing yet; belongs to the loop that runs.

        Args:
            base_url: ends in `/v1`.
            timeout: of one attempt, in seconds.
            retries: further attempts after the first.
            parallel: how many connections may be open.
        """
        self._base_url = base_url
        self._retries = retries
        self._timeout = timeout
        # aiohttp: with many requests at once httpx takes many times the processor time, and the model has the same one.
        self._http = aiohttp.ClientSession(
            headers=headers(),
            timeout=aiohttp.ClientTimeout(total=timeout),
            connector=aiohttp.TCPConnector(limit=parallel),
            trust_env=True,
        )

    async def chat(self, body: dict[str, Any]) -> dict[str, Any]:
        """The answer of `/chat/completions`.

        Busy or absent servers (408, 429, 502, 503, 504, a proxy's plain 404 and 500), timeouts and broken
        connections are tried again.

        Raises:
            ContextExceeded: the messages with the answer do not fit the model's context.
            RequestFailed: the server refused, or was still unavailable after the last retry.
        """
        return _completion(await self._send("POST", "chat/completions", json=body))

    async def download(self, path: str, params: dict[str, Any]) -> bytes:
        """The body that a route below `/v1` answers, held in memory; tried again as `chat` is.

        Args:
            path: below `/v1`, without a slash before it.
            params: of the query.

        Raises:
            RequestFailed: as of `chat`.
        """
        return (await self._send("GET", path, params=params)).content

    async def _send(self, method: str, path: str, **given: Any) -> httpx.Response:
        for attempt in range(self._retries + 1):
            wait = random.uniform(0.5, 1.0) * min(LONGEST_WAIT, 2.0**attempt)
            try:
                response = await self._answer(method, path, **given)
            except TimeoutError:
                reason = f"no answer within {self._timeout:g} s"
            except aiohttp.ClientError as error:
                reason = f"{type(error).__name__}: {error}"
            else:
                if response.is_success:
                    return response
                reason = f"HTTP {response.status_code}: {_message(response)}"
                if _code(response) == "context_length_exceeded":
                    raise ContextExceeded(reason)
                if not _may_pass(response):
                    break
                wait = max(wait, _retry_after(response))
            if attempt < self._retries:
                await asyncio.sleep(wait)
        raise RequestFailed(f"{reason} (attempt {attempt + 1} of {self._retries + 1})")

    async def _answer(self, method: str, path: str, **given: Any) -> httpx.Response:
        async with self._http.request(method, f"{self._base_url}/{path}", **given) as answer:
            told = {name: answer.headers[name] for name in TOLD if name in answer.headers}
            return httpx.Response(answer.status, headers=told, content=await answer.read())

    async def close(self) -> None:
        """Closes the connections."""
        await self._http.close()


def first_model(base_url: str) -> str:
    """The id of the first model that the server lists.

    Raises:
        RequestFailed: no server, no list, or an empty one.
    """
    try:
        response = httpx.get(f"{base_url}/models", headers=headers(), timeout=30)
    except httpx.TransportError as error:
        raise RequestFailed(f"no answer from {base_url}: {error}") from error
    if not response.is_success:
        hint = "; an OpenAI root ends in /v1" if not base_url.endswith("/v1") else ""
        raise RequestFailed(f"{base_url}/models: HTTP {response.status_code}: {_message(response)}{hint}")
    try:
        models = response.json()["data"]
    except (ValueError, TypeError, KeyError) as error:
        raise RequestFailed(f"{base_url}/models is not a list of models; is it an OpenAI server?") from error
    if not models:
        raise RequestFailed(f"{base_url} serves no model yet")
    return str(models[0]["id"])


def ask_json(url: str, params: dict[str, str] | None = None) -> Any:
    """The JSON object that a server tells of itself, or None where it has no such route.

    Raises:
        RequestFailed: no server.
    """
    try:
        response = httpx.get(url, params=params, headers=headers(), timeout=30)
    except httpx.TransportError as error:
        raise RequestFailed(f"no answer from {url}: {error}") from error
    try:
        body = response.json() if response.is_success else None
    except ValueError:
        return None
    return body if isinstance(body, dict) else None


def wait_healthy(base_url: str, seconds: float) -> None:
    """Returns as soon as `/health` of the server is ok and a model is loaded.

    Args:
        base_url: ends in `/v1`; health is asked beside it.
        seconds: how long to go on asking.

    Raises:
        RequestFailed: not healthy in that time; the text has the last answer.
    """
    url = f"{base_url.removesuffix('/v1')}/health"
    end = time.monotonic() + seconds
    while True:
        try:
            response = httpx.get(url, timeout=10)
            last = f"HTTP {response.status_code}: {response.text[:200]}"
            if response.is_success and _is_ready(response):
                return
        except httpx.TransportError as error:
            last = str(error)
        if time.monotonic() > end:
            raise RequestFailed(f"{url} was not healthy within {seconds:g} s; last: {last}")
        time.sleep(0.5)


def headers() -> dict[str, str]:
    """Of every request. The key stays in the environment: options are shown in results and process lists."""
    key = os.environ.get("OPENAI_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


def _is_ready(response: httpx.Response) -> bool:
    try:
        health = response.json()
    except ValueError:
        return False
    return isinstance(health, dict) and health.get("status") == "ok" and bool(health.get("loaded_models"))


def _completion(response: httpx.Response) -> dict[str, Any]:
    try:
        body: dict[str, Any] = response.json()
        body["choices"][0]["message"]["role"]
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise RequestFailed(f"not a chat completion: {response.text[:200]!r}") from error
    return body


def _may_pass(response: httpx.Response) -> bool:
    """Whether to try again; while an application goes down or is not up yet, Serve's proxy answers in plain text."""
    plain = not response.headers.get("Content-Type", "").startswith("application/json")
    return response.status_code in RETRIED or (plain and response.status_code in {404, 500})


def _message(response: httpx.Response) -> str:
    """OpenAI's error message, or the body where a proxy answered in plain text."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, TypeError, KeyError):
        return response.text[:200]


def _code(response: httpx.Response) -> str | None:
    """OpenAI's word for what is wrong, where there is one."""
    try:
        code: str | None = response.json()["error"]["code"]
    except (ValueError, TypeError, KeyError):
        return None
    return code


def _retry_after(response: httpx.Response) -> float:
    """Seconds that the server asks to wait: it may give a number or a date."""
    value = response.headers.get("Retry-After", "0")
    try:
        return min(LONGEST_TOLD, float(value)) if math.isfinite(float(value)) else 0.0
    except ValueError:
        pass
    try:
        return min(LONGEST_TOLD, (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):
        return 0.0
