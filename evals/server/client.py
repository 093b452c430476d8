"""Many requests to a server at once, each with retries."""

import asyncio
import random
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
import httpx

from evals.server.answers import (
    AnswerLate,
    Kind,
    RequestFailed,
    asked_wait_s,
    error_of,
    is_absent,
    is_late,
    kind_of,
    message_of,
)
from evals.server.keys import headers
from evals.server.outage import Clock, Outage

PRESET = "X-Vitrine-Preset"  # header of an answer that a preset changed, and the preset among the answer's fields
KEPT_HEADERS = ("Content-Type", "Retry-After", "Content-Range", PRESET)  # headers that anything hangs on
MAX_WAIT_S = 30.0  # seconds between two attempts, unless the server names a time
MAX_DOUBLINGS = 8  # of the waits between attempts, more than any needs to be its longest
SETTLED_S = 0.01  # seconds after the end of an outage at which it is surely over
MAX_POLL_S = 4.0  # seconds between two looks whether a server that was away is back
CONNECT_S = 10.0  # that a connection may take: a machine that is off refuses none
UNREACHABLE = (aiohttp.ConnectionTimeoutError, aiohttp.ClientConnectorError)
MOST_BYTES = 64 << 20  # of an answer, which is held in memory
PAGE_BYTES = 4 << 20  # of a file, the most in one answer
SPAN = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})", re.ASCII)  # a Content-Range
BROKEN = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, aiohttp.ClientHttpProxyError)


class _Failure(NamedTuple):
    """One attempt without a success.

    Attributes:
        kind: What it means for another.
        reason: For the user.
        wait_s: Seconds that the server asks to wait.
        error: OpenAI's error object, where there is one.
        was_there: Whether the server seems to have taken the request, and lost it later.
        late: Whether the time limit of one request, the client's or the server's, was over.
    """

    kind: Kind
    reason: str
    wait_s: float = 0.0
    error: dict[str, Any] | None = None
    was_there: bool = False
    late: bool = False


class ChatClient:
    """One pool of connections to `base_url`, for one event loop."""

    def __init__(
        self,
        base_url: str,
        *,
        timeout: float,
        retries: int,
        parallel: int,
        max_outage: float = 0.0,
        key: str | None = None,
        clock: Clock = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Initializes the client for the running event loop; connections open later.

        Args:
            base_url: ends in `/v1`.
            timeout: of one attempt, in seconds.
            retries: further attempts of a request after the first, while the server is there.
            parallel: how many connections may be open.
            max_outage: seconds for which a server that is away is waited for, of all requests together.
            key: the server's; by default that of the environment.
            clock: gives the time in seconds.
            sleep: waits for some seconds.
        """
        self._base_url = base_url
        self._retries = retries
        self._timeout = timeout
        self._outage = Outage(max_outage, clock)
        self._clock = clock
        self._sleep = sleep
        self._limit = "max_tokens"  # the field's name, as the server wants it
        # aiohttp: with many requests at once httpx takes many times the processor time, and the model has the same one.
        self._http = aiohttp.ClientSession(
            headers=headers(key),
            timeout=aiohttp.ClientTimeout(total=timeout, connect=min(CONNECT_S, timeout / 2)),
            connector=aiohttp.TCPConnector(limit=parallel),
            trust_env=_has_proxy(base_url),
        )

    async def chat(self, body: dict[str, Any]) -> dict[str, Any]:
        """The answer of `/chat/completions`.

        An answer that does not come within `timeout`, or within the server's own limit (504 with OpenAI's error), is
        not asked for again: it would take as long. A busy server (408, 429; 504 for a request that it never began) is
        asked again, `retries` times. A server that is away (a broken or refused connection; 502, 503, a gateway's 504
        and one without a replica; a proxy's plain 404 and 500; no answer within `timeout`, and none to `/models` then)
        is waited for, `max_outage` seconds. One outage costs no retry, but each further one that others' answers set
        apart from it does: else a request that breaks its connection each time would go on for ever.

        If the server rejects `max_tokens`, later requests have `max_completion_tokens` instead.

        Raises:
            AnswerLate: the answer took too long.
            RequestFailed: the server refused, was still busy at the last retry, or was away for too long.
        """
        sent = self._limited(body)
        try:
            answer = await self._send("POST", "chat/completions", json=sent)
        except RequestFailed as refusal:
            reason = refusal.error.get("param"), refusal.error.get("code")
            if "max_tokens" not in sent or reason != ("max_tokens", "unsupported_parameter"):  # its value is refused
                raise
            self._limit = "max_completion_tokens"
            answer = await self._send("POST", "chat/completions", json=self._limited(body))
        return _completion(answer)

    async def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """The answer of `/completions`; it is tried again as `chat` is.

        Raises:
            RequestFailed: as of `chat`.
        """
        return _object(await self._send("POST", "completions", json=body))

    def _limited(self, body: dict[str, Any]) -> dict[str, Any]:
        return {self._limit if name == "max_tokens" else name: value for name, value in body.items()}

    async def read(self, path: str, **params: Any) -> dict[str, Any]:
        """The JSON object of a route below `/v1`, of some parameters; tried again as `chat` is, also where it is late.

        Raises:
            RequestFailed: as of `chat`, or the answer is none.
        """
        return _object(await self._send("GET", path, params=params))

    async def file_bytes(self, path: str, first: int, end: int, **params: Any) -> AsyncIterator[bytes]:
        """The bytes of a file from `first` to before `end` or to its end, in parts.

        Each part is asked for again as `chat` is, also where it is late.

        Args:
            path: below `/v1`, without a slash before it.
            first: the first byte.
            end: the byte after the last one.
            params: of the query.

        Raises:
            RequestFailed: as of `chat`; or an answer has other bytes.
        """
        while first < end:
            # Compressed, a range would be of what is compressed.
            asked = {"Range": f"bytes={first}-{min(end, first + PAGE_BYTES) - 1}", "Accept-Encoding": "identity"}
            page = await self._send("GET", path, params=params, headers=asked)
            span, size = SPAN.fullmatch(page.headers.get("Content-Range", "")), len(page.content)
            if span is None or not size or (int(span[1]), int(span[2])) != (first, first + size - 1):
                raise RequestFailed(f"the answer does not have the bytes of a file from {first} on")
            yield page.content
            first += size
            end = min(end, int(span[3]))

    async def _send(self, method: str, path: str, **given: Any) -> httpx.Response:
        failures = misses = renewals = 0  # what counts as retries, what does not, and outages that it made longer
        outage = 0  # that was met last
        while True:
            got = await self._attempt(method, path, **given)
            if isinstance(got, httpx.Response):
                return got
            if got.kind == "refused":
                raise RequestFailed(got.reason, got.error)
            if got.late and method == "POST":  # what is generated again takes as long again
                raise AnswerLate(got.reason, got.error)
            counts = got.kind == "busy"
            if got.kind == "away":
                number = self._outage.missed()
                if got.was_there and renewals < self._retries:
                    renewals += 1
                    self._outage.renewed()
                if self._outage.left_s <= 0:
                    raise RequestFailed(self._outage.given_up(got.reason))
                counts = outage not in (0, number)
                outage = number
            failures += counts
            if failures > self._retries:
                raise RequestFailed(f"{got.reason} (attempt {failures} of {self._retries + 1})", got.error)
            misses += not counts
            longest, nth = (MAX_WAIT_S, failures) if counts else (MAX_POLL_S, misses)
            wait = max(random.uniform(0.5, 1.0) * min(longest, 2.0 ** min(nth - 1, MAX_DOUBLINGS)), got.wait_s)
            if got.kind == "away":
                wait = min(wait, self._outage.left_s + SETTLED_S)
            await self._sleep(wait)

    async def _attempt(self, method: str, path: str, **given: Any) -> httpx.Response | _Failure:
        began = self._clock()
        try:
            response = await self._answer(method, path, **given)
        except aiohttp.ClientConnectorCertificateError as error:
            return _Failure("refused", f"{type(error).__name__}: {error}")
        except UNREACHABLE as error:
            return _Failure("away", f"{type(error).__name__}: {error}")
        except TimeoutError:
            reason = f"no answer within {self._timeout:g} s"
            if await self._is_there():
                return _Failure("busy", reason, late=True)
            return _Failure("away", f"{reason}, and none to /models")
        except aiohttp.ClientError as error:
            worked = self._clock() - began > MAX_POLL_S  # on it, or looked for who does
            was_there = worked and not isinstance(error, aiohttp.ClientHttpProxyError)
            kind: Kind = "away" if isinstance(error, BROKEN) else "refused"
            return _Failure(kind, f"{type(error).__name__}: {error}", was_there=was_there)
        meaning = None if response.is_success else kind_of(response)
        if meaning != "away":
            self._outage.met()
        if meaning is None:
            return response
        reason = f"HTTP {response.status_code}: {message_of(response)}"
        return _Failure(meaning, reason, asked_wait_s(response), error_of(response), late=is_late(response))

    async def _is_there(self) -> bool:
        """Whether the server answers what takes no time: one that hangs is no model that takes long."""
        try:
            response = await self._answer("GET", "models", timeout=aiohttp.ClientTimeout(total=CONNECT_S))
        except (aiohttp.ClientError, TimeoutError):
            return False
        return kind_of(response) != "away" or not is_absent(response)

    async def _answer(self, method: str, path: str, **given: Any) -> httpx.Response:
        async with self._http.request(method, f"{self._base_url}/{path}", **given) as answer:
            kept = {name: answer.headers[name] for name in KEPT_HEADERS if name in answer.headers}
            content = bytearray()
            async for piece in answer.content.iter_chunked(1 << 20):  # inflated, where the server compressed it
                content += piece
                if len(content) > MOST_BYTES:
                    raise RequestFailed(f"HTTP {answer.status}: the answer has more than {MOST_BYTES >> 20} MiB")
            return httpx.Response(answer.status, headers=kept, content=bytes(content))

    async def close(self) -> None:
        """Closes the connections."""
        await self._http.close()


def _has_proxy(url: str) -> bool:
    """Whether the environment names a proxy for it; aiohttp asks anew for each request, which takes it two threads."""
    parts = urlsplit(url)
    return parts.scheme in getproxies() and not proxy_bypass(parts.hostname or "")


def _object(response: httpx.Response) -> dict[str, Any]:
    try:
        body = response.json()
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise RequestFailed(f"not a JSON object: {response.text[:200]!r}")
    return body


def _completion(response: httpx.Response) -> dict[str, Any]:
    try:
        body: dict[str, Any] = response.json()
        body["choices"][0]["message"]["role"]
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise RequestFailed(f"not a chat completion: {response.text[:200]!r}") from error
    return body | ({PRESET: response.headers[PRESET]} if PRESET in response.headers else {})
