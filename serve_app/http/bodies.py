"""Parsing of JSON bodies: small ones directly, large ones in other processes, so that the event loop stays free."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from weakref import WeakValueDictionary

from fastapi import HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.requests import ClientDisconnect

import serve_app.http.body_process as body_process
from deployments.errors import RequestError
from serve_app.http.body_process import SIZE, SIZES
from serve_app.http.errors import ApiError
from serve_app.http.parsing import Below, parsed

MOST_AT_ONCE = 16 << 10  # bytes that the event loop parses itself, which takes a few milliseconds at most
PROCESSES = 2
MOST_WAITING = 8  # waiting large bodies of an owner, besides the one being parsed
LIMIT_S = 30.0  # time limit for one body; generous, because the process has a low priority
MOST_MEMORY = 2 << 30  # bytes of memory of such a process


class Bodies:
    """The processes that parse large bodies; each starts when first needed.

    They parse one body of an owner at a time, so that one owner cannot delay the others.
    """

    def __init__(self) -> None:
        self._waiting: Counter[str | None] = Counter()  # bodies by owner, including the one being parsed
        self._turns: WeakValueDictionary[str | None, asyncio.Lock] = WeakValueDictionary()  # by owner
        self._idle: list[_Process] = []
        self._places = asyncio.Semaphore(PROCESSES)
        self._threads = ThreadPoolExecutor(PROCESSES, "bodies")  # they wait for the processes

    async def read(self, kind: type[BaseModel], raw: bytes, owner: str | None, below: Below | None = None) -> BaseModel:
        """Parse a body into an object of this kind.

        Args:
            kind: The schema.
            raw: The JSON text.
            owner: The sender; None on a server without keys.
            below: Fields for those that the body leaves out.

        Raises:
            RequestError: It does not match the schema.
            ApiError: 413 if it takes too much memory; 429 if too many bodies of this owner wait; 503 if its process
                takes too long or has ended.
        """
        if len(raw) <= MOST_AT_ONCE:
            return parsed(kind, raw, below)
        if self._waiting[owner] > MOST_WAITING:
            message = f"{MOST_WAITING} of your large requests are waiting; retry after one completes"
            raise ApiError(429, message, code="server_busy")
        turn = self._turns.setdefault(owner, asyncio.Lock())
        self._waiting[owner] += 1
        try:
            async with turn, self._places:
                found = await self._elsewhere(kind, raw, below)
        finally:
            self._waiting[owner] -= 1
            self._waiting += Counter()  # drops counts of 0
        if isinstance(found, RequestError):
            raise found
        return found

    def close(self) -> None:
        """End the idle processes. Blocks."""
        while self._idle:
            self._idle.pop().close()

    async def _elsewhere(self, kind: type[BaseModel], raw: bytes, below: Below | None) -> BaseModel | RequestError:
        process = self._idle.pop() if self._idle else _Process()
        try:
            async with asyncio.timeout(LIMIT_S):
                loop = asyncio.get_running_loop()
                found = await loop.run_in_executor(self._threads, process.parsed, kind, raw, below)
        except BaseException as error:  # also if the client disconnects: the process must not continue with its body
            process.end()
            if isinstance(error, TimeoutError):
                raise ApiError(503, f"the body was not read within {LIMIT_S:g} s", code="timeout") from error
            if isinstance(error, EOFError):  # without more memory, the parser ends its process
                raise ApiError(413, "the body takes too much memory to read", code="body_too_large") from error
            if isinstance(error, OSError):
                raise ApiError(503, "the process that read the body ended; try again", code="unavailable") from error
            raise
        self._idle.append(process)
        return found


class _Process:
    """A `body_process`, which parses one body at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = False

    def parsed(self, kind: type[BaseModel], raw: bytes, below: Below | None) -> BaseModel | RequestError:
        """The parsed object, or the error. Blocks.

        Raises:
            EOFError: The process ended while parsing the body.
            OSError: The process had ended before, or did not start.
        """
        try:
            self._process = self._process or _started()
            if self._ended:  # while it started
                raise EOFError
            return _answer(self._process, kind, raw, below)
        except (EOFError, OSError):
            self.close()
            raise

    def end(self) -> None:
        """Kill the process; the thread that waits for it closes it."""
        self._ended = True
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """Kill the process and release its resources. Blocks."""
        self.end()
        if self._process is not None:
            with contextlib.suppress(OSError):  # unsent data
                self._process.__exit__(None, None, None)


def _started() -> subprocess.Popen[bytes]:
    # Its environment contains only the path of its modules, because the server's contains keys.
    return subprocess.Popen(
        [sys.executable, "-P", body_process.__file__, str(MOST_MEMORY)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )


def _answer(
    process: subprocess.Popen[bytes], kind: type[BaseModel], raw: bytes, below: Below | None
) -> BaseModel | RequestError:
    asked, answered = process.stdin, process.stdout
    assert asked is not None
    assert answered is not None
    wanted = pickle.dumps((kind.__module__, kind.__name__, below))
    asked.write(SIZES.pack(len(wanted), len(raw)) + wanted)
    asked.write(raw)
    asked.flush()
    head = answered.read(SIZE.size)
    answer = answered.read(SIZE.unpack(head)[0]) if len(head) == SIZE.size else b""
    if not answer:
        raise EOFError
    found: BaseModel | RequestError = pickle.loads(answer)  # noqa: S301, of our own process
    return found


class _Parsed(Request):
    """A request whose body is already parsed."""

    def __init__(self, request: Request, raw: bytes, body: BaseModel | Exception) -> None:
        super().__init__(request.scope, request.receive)
        self._raw = raw
        self._parsed = body

    async def body(self) -> bytes:
        return self._raw

    async def json(self) -> Any:
        return self._parsed


class JsonRoute(APIRoute):
    """A route whose body `Bodies` parses instead of FastAPI; a route without a body is unchanged."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler that FastAPI calls with each request."""
        handle = super().get_route_handler()
        kind = self.body_field.field_info.annotation if self.body_field else None
        if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
            return handle

        async def handle_parsed(request: Request) -> Response:
            try:
                raw = await request.body()
            except ClientDisconnect as gone:
                raise HTTPException(400, "the client disconnected before sending the whole body") from gone
            body: BaseModel | Exception
            try:
                body = await request.app.state.bodies.read(kind, raw, request.state.caller.owner)
            except (RequestError, ApiError) as error:
                body = error
            try:
                return await handle(_Parsed(request, raw, body))
            except RequestValidationError:  # raised after the route's checks of keys and permissions
                if isinstance(body, Exception):
                    raise body from None
                raise

        return handle_parsed
