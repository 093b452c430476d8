"""Requests to one server: limited concurrency, retries where they can help, and bytes of files."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import httpx

import vitrine.connection.sockets  # noqa: F401 - before the first request
from vitrine.server_error import ServerError

AT_ONCE = 32  # requests of one client
SEQUENCES_AT_ONCE = 256  # of these requests: four batches of a replica, so that other clients are served, too
ATTEMPTS = 6  # if connections break
LONGEST_PAUSE_S = 30.0
BUSY = (429, 503)
DISCONNECTS = (httpx.ConnectError, httpx.ConnectTimeout, httpx.ReadError, httpx.RemoteProtocolError, httpx.WriteError)
PAGE_BYTES = 4 << 20  # of a file, the most in one answer

_T = TypeVar("_T")


class Transport:
    """HTTP requests to one server.

    Attributes:
        url: The server's address, without `/v1`.
        api_key: The API key, if any.
        timeout: Seconds to wait for each answer, and to retry while the server is busy.
    """

    def __init__(self, url: str, api_key: str | None, timeout: float) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"url: {url!r} does not begin with http:// or https://")
        self.url = url.rstrip("/").removesuffix("/v1").rstrip("/")
        self.api_key = api_key
        self.timeout = timeout
        self._room = _Room(SEQUENCES_AT_ONCE)
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(timeout, connect=10, pool=None),
            limits=httpx.Limits(max_connections=AT_ONCE),
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def get(self, path: str, query: Mapping[str, Any] | None = None, attempts: int = ATTEMPTS) -> dict[str, Any]:
        """Return the JSON answer of a route.

        Raises:
            ServerError: The server rejects the request.
            ConnectionError: It does not answer.
        """
        answer: dict[str, Any] = (await self._answer("GET", path, attempts, params=query)).json()
        return answer

    async def post(self, path: str, body: Mapping[str, Any], sequences: int = 0) -> dict[str, Any]:
        """Post a JSON body, which may contain numpy numbers and arrays, and return the JSON answer. Raises as `get`.

        If the connection breaks before the answer, the request is sent again, so its activations may be stored twice.

        Args:
            path: The route's path.
            body: The request's body.
            sequences: How many sequences the server runs for it; it waits while this client runs too many.
        """
        content = json.dumps(body, default=_plain, allow_nan=False)
        headers = {"Content-Type": "application/json"}
        async with self._room.of(sequences):
            answer: dict[str, Any] = (await self._answer("POST", path, content=content, headers=headers)).json()
        return answer

    async def file_bytes(self, path: str, first: int, end: int) -> bytes:
        """Fetch the bytes of a file from `first` to before `end`, or to its end. Raises as `get`."""
        body = bytearray()
        while first + len(body) < end:
            asked = f"bytes={first + len(body)}-{min(first + len(body) + PAGE_BYTES, end) - 1}"
            headers = {"Range": asked, "Accept-Encoding": "identity"}  # a compressed answer would have other bytes
            page = await self._answer("GET", path, headers=headers)
            body += page.content
            length = int(page.headers["Content-Range"].rpartition("/")[2])
            if not page.content or first + len(body) >= length:
                break
        return bytes(body)

    async def _answer(self, method: str, path: str, attempts: int = ATTEMPTS, **request: Any) -> httpx.Response:
        """Return an answer of status 200 or 206. Retries while the server is busy and after a broken connection."""
        end, lost = time.monotonic() + self.timeout, 0
        for pause in _pauses():
            try:
                answer = await self._http.request(method, path, **request)
                if answer.is_success:
                    return answer
                pause = max(pause, _retry_after(answer))
                if answer.status_code not in BUSY or attempts == 1 or time.monotonic() + pause > end:
                    raise ServerError.of(answer)
            except DISCONNECTS as error:
                lost += 1
                if lost == attempts:
                    reason = str(error) or type(error).__name__
                    raise ConnectionError(f"{self.url} does not answer: {reason}; is it running?") from error
            except httpx.TimeoutException as error:
                raise TimeoutError(
                    f"{self.url}{path} did not answer in time; raise the limit with connect(timeout=...)"
                ) from error
            await asyncio.sleep(pause)
        raise AssertionError("the pauses do not end")


async def together(calls: Iterable[Awaitable[_T]]) -> list[_T]:
    """Await calls and return their results in order; the first failure cancels the others."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


class _Room:
    """Limits the number of sequences that run at once."""

    def __init__(self, most: int) -> None:
        self._most = self._left = most
        self._changed = asyncio.Condition()

    @contextlib.asynccontextmanager
    async def of(self, sequences: int) -> AsyncIterator[None]:
        """Hold room for some sequences; a request above the limit waits until it is alone."""
        taken = min(sequences, self._most)
        async with self._changed:
            await self._changed.wait_for(lambda: self._left >= taken)
            self._left -= taken
        try:
            yield
        finally:
            self._left += taken
            async with self._changed:
                self._changed.notify_all()


def _pauses() -> Iterator[float]:
    """Seconds between attempts: random, and doubled each time."""
    longest = min(0.5, LONGEST_PAUSE_S)
    while True:
        yield random.uniform(0.5, 1) * longest
        longest = min(2 * longest, LONGEST_PAUSE_S)


def _retry_after(answer: httpx.Response) -> float:
    """Seconds to wait as the server requests; 0 if it does not."""
    try:
        return min(float(answer.headers["Retry-After"]), LONGEST_PAUSE_S)
    except (KeyError, ValueError):  # missing, or a date
        return 0.0


def _plain(value: Any) -> Any:
    """Convert numpy numbers and arrays, ranges, and tuples of them to JSON types."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, range):
        return list(value)
    raise TypeError(f"{value!r:.60} of type {type(value).__name__} cannot be sent: give numbers, texts, lists or dicts")
