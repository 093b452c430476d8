"""Answers in pages of a few MiB: lists, and files by range requests.

Serve's proxy buffers the part that a client has not read yet. The length of an answer therefore bounds the memory
for a client that stops reading.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Any, NamedTuple

from fastapi import Depends, Header, Request
from fastapi.responses import Response, StreamingResponse

from deployments.activations.filters import MOST_BYTES, FilePart
from serve_app.http.errors import ApiError

MOST_NAMED = 20_000  # points or tensors of all items of a page, each a few hundred bytes
PAGE_BYTES = MOST_BYTES  # the proxy holds about 1.4 times as much
_PIECE_BYTES = 1 << 20
# Seconds, and bytes per second: a slower client no longer delays its owner's other downloads.
LONGEST_S, SLOWEST_BYTES = 60.0, 1 << 20
_RANGE = re.compile(r"bytes=[ \t]*(\d{1,18})-(\d{0,18})[ \t]*", re.ASCII | re.IGNORECASE)

Read = Callable[[int, int], Awaitable[FilePart]]  # `await read(first, end)`: the bytes from `first` to before `end`


def first_page(items: list[dict[str, Any]], limit: int) -> tuple[list[dict[str, Any]], bool]:
    """The first `limit` items, or as many as fit into a page but at least one, and whether there are more.

    Args:
        items: Up to `limit` + 1 items, which list `points` or `tensors`.
        limit: The most items.
    """
    named = 0
    for place, item in enumerate(items[:limit]):
        named += len(item.get("points", ())) + len(item.get("tensors", ()))
        if place and named > MOST_NAMED:
            return items[:place], True
    return items[:limit], len(items) > limit


class RequestedRange(NamedTuple):
    """What a request says of the bytes that it wants."""

    is_head: bool
    range: str | None


async def _asked(
    request: Request,
    range: Annotated[
        str | None,
        Header(max_length=1024, description=f"`bytes=a-b`; of a longer range, the first {PAGE_BYTES} bytes are sent."),
    ] = None,
) -> RequestedRange:
    return RequestedRange(request.method == "HEAD", range)


Ranged = Annotated[RequestedRange, Depends(_asked)]


async def page(asked: RequestedRange, read: Read, media_type: str) -> Response:
    """Answer with the requested bytes of a file, at most `PAGE_BYTES`. A range without a beginning is ignored.

    Raises:
        ApiError: 413, no range is requested of a larger file; 416, the range starts after its end.
    """
    headers = {"Accept-Ranges": "bytes"}
    if asked.is_head:
        part = await read(0, 0)
        return Response(headers=headers | {"Content-Length": str(part.length)}, media_type=media_type)
    match = _RANGE.fullmatch(asked.range or "")
    first = int(match[1]) if match else 0
    end = int(match[2]) + 1 if match and match[2] else first + PAGE_BYTES
    if match is None or end <= first:
        part = await read(0, PAGE_BYTES)
        if part.length > PAGE_BYTES:
            raise _too_large(part.length)
        return _body(part.data, 200, headers, media_type)
    part = await read(first, min(end, first + PAGE_BYTES))
    if first >= part.length:
        message = f"the range begins after the last of {part.length} bytes"
        raise ApiError(416, message, "Range", "range_not_satisfiable", {"Content-Range": f"bytes */{part.length}"})
    headers["Content-Range"] = f"bytes {first}-{first + len(part.data) - 1}/{part.length}"
    return _body(part.data, 206, headers, media_type)


class Budget:
    """Bytes that all answers together may hold. Use it on one event loop."""

    def __init__(self, most: int) -> None:
        """Initialize the budget as unused."""
        self._most = most
        self._held = 0
        self._freed = asyncio.Event()

    @asynccontextmanager
    async def hold(self, size: int) -> AsyncIterator[None]:
        """Hold `size` bytes while the block runs, once there is room; a larger size is admitted alone."""
        while self._held and self._held + size > self._most:
            await self._freed.wait()
        self._held += size
        try:
            yield
        finally:  # without an await, which a cancellation would interrupt
            self._held -= size
            self._freed.set()
            self._freed = asyncio.Event()


async def whole(read: Callable[[int, int], Awaitable[bytes]], length: int, budget: Budget) -> AsyncGenerator[bytes]:
    """All bytes of a download, for a client without ranges; a large one waits while others are sent.

    Args:
        read: `await read(first, end)` returns the bytes from `first` to before `end`.
        length: The number of bytes.
        budget: The memory of such answers. One larger than a page holds its part until the client has closed the
            connection, or would have read it at a slow rate.
    """
    is_large = length > PAGE_BYTES
    async with budget.hold(length if is_large else 0):
        for first in range(0, length, PAGE_BYTES):
            yield await read(first, min(first + PAGE_BYTES, length))
        if is_large:  # Serve's proxy holds the unread part; when the client disconnects, this is cancelled
            await asyncio.sleep(LONGEST_S + length / SLOWEST_BYTES)


def _body(data: bytes, status: int, headers: dict[str, str], media_type: str) -> Response:
    """An answer that ends when the client has read it; until then its connection starts no other request."""

    async def pieces() -> AsyncIterator[bytes]:
        for first in range(0, len(data), _PIECE_BYTES):  # the proxy copies one piece at a time instead of the whole
            yield data[first : first + _PIECE_BYTES]

    return StreamingResponse(pieces(), status, headers | {"Content-Length": str(len(data))}, media_type)


def _too_large(length: int) -> ApiError:
    message = (
        f"it has {length} bytes, and an answer has at most {PAGE_BYTES}: request ranges, the first with "
        f"`Range: bytes=0-{PAGE_BYTES - 1}`, the others from where `Content-Range` ends"
    )
    return ApiError(413, message, "Range", "range_required", {"Accept-Ranges": "bytes"})
