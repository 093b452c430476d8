"""Requests to one server: limited concurrency, repetition where it can help, and bytes of files."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Iterable, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from importlib import import_module
from typing import Any, Literal, NamedTuple, TypeVar

import httpx

from vitrine.server_error import AnswerLate, RequestFailed, ServerAway, ServerError, error_of

AT_ONCE = 32  # requests of one client
CONNECTIONS = 8  # of one pool of httpx, which takes time in the square of their number
SEQUENCES_AT_ONCE = 256  # of these requests: four batches of a replica, so that other clients are served, too
MAX_OUTAGE_S = 30.0
CONNECT_S = 10.0  # for a connection: a machine that is off refuses none
LONGEST_PAUSE_S = 30.0  # between two attempts, unless the server asks for a longer one
LONGEST_AWAY_S = 4.0  # the same for a server that is away
LONGEST_ASKED_S = 600.0  # that a server may ask to wait
PAGE_BYTES = 4 << 20  # of a file, the most in one answer
NO_REPLICA, NOT_STARTED = "unavailable", "not_started"  # codes of a 504 if no model worked on the request

Kind = Literal["refused", "busy", "starting", "away", "late"]
_T = TypeVar("_T")
_now, _sleep = time.monotonic, asyncio.sleep


class Transport:
    """HTTP requests to one server.

    What a failure means for the request, and what happens:

    - refused (any other 4xx or 5xx): an error at once.
    - busy (408, 429, 504 `not_started`): sent again after growing random pauses, at least as long as `Retry-After`,
      `retries` times, or for `timeout` seconds if `retries` is None. A GET whose answer is late counts as busy.
    - away (a connection that is refused or breaks; 502; 503 or 504 without OpenAI's error, 504 `unavailable`; 404 or
      500 in plain text, as Ray Serve's proxy answers without an application; a late answer, and none to `/models`):
      sent again for `max_outage` seconds after the first sign of absence to any request of this client. A request's
      first outage is free, and each further one counts like a busy answer, so that a request that always breaks its
      connection ends.
    - starting (503 with OpenAI's error): like busy if `retries` is None, since a model may take long to load; else like
      away.
    - late (no answer within `timeout`; any other 504 with OpenAI's error): an error at once.

    Attributes:
        root: The address below which the API's routes are, such as `http://127.0.0.1:8000/v1`.
        api_key: The API key, if any.
        timeout: Seconds to wait for each answer.
    """

    def __init__(
        self,
        root: str,
        api_key: str | None,
        timeout: float,
        *,
        retries: int | None = None,
        max_outage: float = MAX_OUTAGE_S,
        parallel: int = AT_ONCE,
    ) -> None:
        """Create the client; connections open at the first request.

        Args:
            root: The address below which the API's routes are.
            api_key: The API key, if any.
            timeout: Seconds to wait for each answer.
            retries: How often a request is sent again to a busy server; None for `timeout` seconds.
            max_outage: Seconds to wait for a server that is away, for all requests together.
            parallel: The most requests at once.

        Raises:
            ValueError: The address or the key is invalid.
        """
        if not root.startswith(("http://", "https://")):
            raise ValueError(f"url: {root!r} does not begin with http:// or https://")
        if api_key and not (api_key.isascii() and api_key.isprintable() and api_key == api_key.strip()):
            raise ValueError("api_key: the key has spaces around it, or characters other than printable ASCII")
        self.root = root.rstrip("/")
        self.api_key = api_key
        self.timeout = timeout
        self._retries = retries
        self._outage = _Outage(max_outage)
        self._room = _Room(SEQUENCES_AT_ONCE)
        context = httpx.create_ssl_context()  # shared: it takes milliseconds
        try:
            self._probe, *self._pools = (
                httpx.AsyncClient(
                    base_url=self.root,
                    headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
                    timeout=httpx.Timeout(timeout, connect=min(CONNECT_S, timeout / 2)),
                    limits=httpx.Limits(max_connections=CONNECTIONS),
                    verify=context,
                )
                for _ in range(1 + math.ceil(parallel / CONNECTIONS))
            )
        except httpx.InvalidURL as error:
            raise ValueError(f"url: {root!r}: {error}") from error
        self._free = (self._pools * CONNECTIONS)[:parallel]
        self._slots = asyncio.Semaphore(parallel)

    @property
    def url(self) -> str:
        """The server's address, without `/v1`."""
        return self.root.removesuffix("/v1").rstrip("/")

    async def close(self) -> None:
        """Close the connections."""
        for pool in (self._probe, *self._pools):
            await pool.aclose()

    async def get(self, path: str, query: Mapping[str, Any] | None = None, repeat: bool = True) -> dict[str, Any]:
        """Return the JSON answer of a route below `root`.

        Args:
            path: The route's path below `root`.
            query: The parameters.
            repeat: Whether the request is sent again if the server is starting or away.

        Raises:
            ServerError: The server rejects the request, or stays busy.
            ServerAway: It does not answer; a `ConnectionError`.
            AnswerLate: It does not answer in time; a `TimeoutError`.
        """
        return json_object(await self._send("GET", path, repeat=repeat, params=query))

    async def post(self, path: str, body: Mapping[str, Any], sequences: int = 0, repeat: bool = True) -> dict[str, Any]:
        """Post a JSON body, which may contain numpy numbers and arrays, and return the JSON answer. Raises as `get`.

        If the connection breaks before the answer, the request is sent again, so its activations may be stored twice.

        Args:
            path: The route's path below `root`.
            body: The request's body.
            sequences: How many sequences the server runs for it; it waits while this client runs too many.
            repeat: Whether the request is sent again although a part of it may have been done.
        """
        content = json.dumps(body, default=plain, allow_nan=False)
        headers = {"Content-Type": "application/json"}
        async with self._room.of(sequences):
            return json_object(await self._send("POST", path, repeat=repeat, content=content, headers=headers))

    async def upload(self, path: str, data: bytes, fields: Mapping[str, str]) -> dict[str, Any]:
        """Post a form with a `file` and texts once, and return the JSON answer. Raises as `get`."""
        return json_object(await self._send("POST", path, repeat=False, files={"file": data}, data=fields))

    async def file_bytes(
        self, path: str, first: int, end: int, query: Mapping[str, Any] | None = None
    ) -> AsyncIterator[bytes]:
        """Fetch the bytes of a file from `first` to before `end`, in pages. Raises as `get`."""
        while first < end:
            asked = f"bytes={first}-{min(first + PAGE_BYTES, end) - 1}"
            headers = {"Range": asked, "Accept-Encoding": "identity"}  # a compressed answer would have other bytes
            page = await self._send("GET", path, params=query, headers=headers)
            span, size = page.headers.get("Content-Range", ""), len(page.content)
            if not size or not span.startswith(f"bytes {first}-{first + size - 1}/"):
                raise ServerError(f"the answer does not have the file's bytes from {first} on", page.status_code)
            yield page.content
            first += size

    async def _send(self, method: str, path: str, *, repeat: bool = True, **request: Any) -> httpx.Response:
        """Return an answer of status 2xx, or raise as `get`."""
        end, failures, attempts, outage = 0.0, 0, 0, 0
        while True:
            outcome = await self._attempt(method, path, **request)
            if isinstance(outcome, httpx.Response):
                return outcome
            kind, error, asked_s = outcome
            end = end or _now() + self.timeout  # not from the beginning: it may have waited for its turn
            if kind == "late" and method == "GET":
                kind = "busy"
            if kind in ("refused", "late") or (kind == "starting" and not repeat):
                raise error
            if kind == "starting":
                kind = "busy" if self._retries is None else "away"
            attempts += 1
            counts = kind == "busy"
            if kind == "away":
                number = self._outage.missed()
                waited_s = self._outage.limit_s - self._outage.left_s
                after = f"; waited {waited_s:.0f} s" if waited_s >= 1 else ""
                error = ServerAway(f"{self.url} does not answer: {error}{after}", error.status)
                if not repeat or self._outage.left_s <= 0:
                    raise error
                counts, outage = outage not in (0, number), number
            failures += counts
            wait_s = max(pause_s(attempts, LONGEST_PAUSE_S if counts else LONGEST_AWAY_S), asked_s)
            if kind == "away":
                wait_s = min(wait_s, self._outage.left_s + 0.01)  # the outage is then surely over
            if _now() + wait_s > end if self._retries is None else failures > self._retries:
                raise error
            await _sleep(wait_s)

    async def _attempt(self, method: str, path: str, **request: Any) -> httpx.Response | _Failure:
        try:
            answer = await self._exchange(method, path, **request)
        except httpx.ConnectTimeout as error:
            return _Failure("away", RequestFailed(f"no connection: {type(error).__name__}"))
        except httpx.TimeoutException:
            reason = f"no answer within {self.timeout:g} s"
            if await self._answers():
                return _Failure("late", AnswerLate(f"{self.url}: {reason}: raise the timeout"))
            return _Failure("away", RequestFailed(f"{reason}, and none to /models"))
        except (httpx.LocalProtocolError, httpx.UnsupportedProtocol) as error:
            return _Failure("refused", RequestFailed(f"{self.url}: the request is invalid ({type(error).__name__})"))
        except httpx.RequestError as error:
            return _Failure("away", RequestFailed(str(error) or type(error).__name__))
        kind = None if answer.is_success else kind_of(answer)
        if kind not in ("away", "starting"):
            self._outage.met()
        if kind is None:
            return answer
        failed = ServerError.of(answer)
        late = AnswerLate(str(failed), failed.status, failed.param, failed.code)
        return _Failure(kind, late if kind == "late" else failed, _retry_after_s(answer))

    async def _answers(self) -> bool:
        """Whether the server answers a request that takes no time, so that it only works long on another."""
        try:
            answer = await self._exchange("GET", "/models", is_probe=True, timeout=CONNECT_S)
        except httpx.RequestError:
            return False
        if is_there := answer.is_success or kind_of(answer) not in ("away", "starting"):
            self._outage.met()
        return is_there

    async def _exchange(self, method: str, path: str, is_probe: bool = False, **request: Any) -> httpx.Response:
        if is_probe:  # requests may hold all other connections
            return await self._probe.request(method, path, **request)
        async with self._slots:
            pool = self._free.pop()
            try:
                return await pool.request(method, path, **request)
            finally:
                self._free.append(pool)


async def together(calls: Iterable[Awaitable[_T]]) -> list[_T]:
    """Await calls and return their results in order; the first failure cancels the others."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def api_root(url: str) -> str:
    """The root of the API of a Vitrine server, whose address is given with or without `/v1`."""
    return f"{url.rstrip('/').removesuffix('/v1').rstrip('/')}/v1"


def kind_of(answer: httpx.Response) -> Kind:
    """What an answer that is no success means for another attempt: see `Transport`."""
    status, error = answer.status_code, error_of(answer)
    if status in (408, 429):
        return "busy"
    if status == 504 and error and error.get("code") != NO_REPLICA:
        return "busy" if error.get("code") == NOT_STARTED else "late"
    if status == 503 and error:
        return "starting"
    is_plain = not answer.headers.get("Content-Type", "").startswith("application/json")
    return "away" if status in (502, 503, 504) or (is_plain and status in (404, 500)) else "refused"


def json_object(answer: httpx.Response) -> dict[str, Any]:
    """The JSON object in a successful answer.

    Raises:
        ServerError: There is none.
    """
    try:
        body = answer.json()
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise ServerError(f"{answer.url} did not answer with a JSON object: {answer.text[:200]!r}", answer.status_code)
    return body


def pause_s(attempt: int, longest: float = LONGEST_PAUSE_S) -> float:
    """Seconds to wait after an attempt, counted from 1: random, and doubled each time."""
    return random.uniform(0.5, 1) * min(longest, 2.0 ** min(attempt - 1, 8))


class _Failure(NamedTuple):
    """One attempt without a success; `asked_s` are the seconds that the server asks to wait."""

    kind: Kind
    error: RequestFailed
    asked_s: float = 0.0


class _Outage:
    """The time from the first sign of absence after the last answer of any request until the next answer."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._began: float | None = None
        self._last = 0.0  # sign of absence
        self._number = 0

    def missed(self) -> int:
        """Note that the server was not there; returns the number of this outage, from 1."""
        if self._began is None or _now() - self._last > 2 * LONGEST_PAUSE_S:  # all that waited has been answered since
            self._began = _now()
            self._number += 1
        self._last = _now()
        return self._number

    def met(self) -> None:
        """Note that the server answered."""
        self._began = None

    @property
    def left_s(self) -> float:
        """For how long the server is still waited for; 0 or less if no longer."""
        return self.limit_s - (0.0 if self._began is None else _now() - self._began)


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


def _retry_after_s(answer: httpx.Response) -> float:
    """Seconds to wait as the server requests, by a number or a date; 0 if it does not."""
    value = answer.headers.get("Retry-After", "")
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds()
        except (ValueError, TypeError):  # also a date without a time zone
            return 0.0
    return min(LONGEST_ASKED_S, seconds) if math.isfinite(seconds) else 0.0


def plain(value: Any) -> Any:
    """Convert numpy numbers and arrays, ranges, and tuples of them to JSON types."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, range):
        return list(value)
    raise TypeError(f"{value!r:.60} of type {type(value).__name__} cannot be sent: give numbers, texts, lists or dicts")


def _define_attributes() -> None:
    """Import what httpx imports at its first request, because that import fails after nnsight's.

    nnsight adds a method `save` to every object (`nnsight.CONFIG.APP.PYMOUNT`). anyio would find it as an untyped
    attribute of the classes that it defines.
    """
    nnsight = sys.modules.get("nnsight") if hasattr(object, "save") else None
    if nnsight:
        nnsight._c.unmount("save")
    try:
        import_module("anyio.abc").SocketAttribute  # noqa: B018 - it is defined at its first use
        import_module("anyio.streams.tls").TLSAttribute  # noqa: B018
    finally:
        if nnsight:
            nnsight._c.mount(nnsight.save, "save")


_define_attributes()
