"""Downloads in pages, with the range requests of RFC 9110: no answer is longer than `PAGE_BYTES`.

Serve's proxy buffers the part that a client has not read yet. The length of an answer therefore bounds the memory
for a client that stops reading.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Annotated, NamedTuple

from fastapi import Depends, Header, Request
from fastapi.responses import Response, StreamingResponse

from deployments.activations.filters import download_changed
from serve_app.http.budget import Budget
from serve_app.http.errors import ApiError

PAGE_BYTES = 4 << 20  # the proxy holds about 1.4 times as much
_PIECE_BYTES = 1 << 20
# Seconds, and bytes per second: a slower client no longer delays its owner's other downloads.
LONGEST_S, SLOWEST_BYTES = 60.0, 1 << 20
_ONE_RANGE = re.compile(r"bytes=[ \t]*(\d{0,18})-(\d{0,18})[ \t]*", re.ASCII | re.IGNORECASE)


class Download(NamedTuple):
    """A file to download.

    Attributes:
        tag: Changes when the bytes do.
        length: Its number of bytes.
        read: `await read(first, end)` returns the bytes from `first` to before `end`.
    """

    tag: str
    length: int
    read: Callable[[int, int], Awaitable[bytes]]


class RequestedRange(NamedTuple):
    """The range and precondition headers of a request."""

    is_head: bool
    range: str | None
    if_match: str | None
    if_none_match: str | None
    if_range: str | None

    @property
    def tag(self) -> str | None:
        """The only tag of a download to continue; None if the headers have none or several."""
        match = re.fullmatch(r'"([!#-~]{1,200})"', self.if_match or self.if_range or "")
        return match[1] if match else None


async def _asked(
    request: Request,
    range: Annotated[
        str | None,
        Header(
            max_length=1024,
            description=f"`bytes=a-b`, one range; of a longer range, the first {PAGE_BYTES} bytes are sent.",
        ),
    ] = None,
    if_match: Annotated[
        str | None, Header(max_length=1024, description="The first page's `ETag`; 412 if it changed.")
    ] = None,
    if_none_match: Annotated[
        str | None, Header(max_length=1024, description="304 if the `ETag` is still this one.")
    ] = None,
    if_range: Annotated[
        str | None, Header(max_length=1024, description="Ignore `Range` if the `ETag` differs.")
    ] = None,
) -> RequestedRange:
    return RequestedRange(request.method == "HEAD", range, if_match, if_none_match, if_range)


Ranged = Annotated[RequestedRange, Depends(_asked)]


async def page(asked: RequestedRange, of: Download, media_type: str, headers: dict[str, str] | None = None) -> Response:
    """Answer with the requested bytes, at most `PAGE_BYTES`.

    Args:
        asked: The request's headers.
        of: The download.
        media_type: The download's media type.
        headers: Further headers of the answer.

    Raises:
        RequestError: 412, `If-Match` has another tag.
        ApiError: 413, no range is requested of a larger download; 416, the range starts after its end.
    """
    tag = f'"{of.tag}"'
    headers = {"Accept-Ranges": "bytes", "ETag": tag, **(headers or {})}
    if asked.if_match is not None and not {"*", tag} & _listed(asked.if_match):
        raise download_changed()
    if asked.if_none_match is not None and {"*", tag, f"W/{tag}"} & _listed(asked.if_none_match):
        return Response(status_code=304, headers=headers)
    if asked.is_head:
        return Response(headers=headers | {"Content-Length": str(of.length)}, media_type=media_type)
    span = _span(asked.range, of.length) if asked.if_range in (None, tag) else None
    if span is not None:
        first, end = span
        headers["Content-Range"] = f"bytes {first}-{end - 1}/{of.length}"
        return _body(await of.read(first, end), 206, headers, media_type)
    if of.length > PAGE_BYTES:
        raise _too_large(of.length, headers)
    return _body(await of.read(0, of.length), 200, headers, media_type)


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


def _listed(tags: str) -> set[str]:
    return {tag.strip() for tag in tags.split(",")}


def _span(asked: str | None, length: int) -> tuple[int, int] | None:
    """The bytes that a `Range` header requests, `first` to `end`; None unless it requests a single range of bytes.

    Raises:
        ApiError: 416, the range starts after the end.
    """
    match = _ONE_RANGE.fullmatch(asked or "")
    if match is None or not any(match.groups()):
        return None
    if not match[1]:
        first, end = max(length - int(match[2]), 0), length
    else:
        first, end = int(match[1]), int(match[2]) + 1 if match[2] else length
        if match[2] and end <= first:
            return None
    if first >= length:
        message = f"the range begins after the last of {length} bytes"
        raise ApiError(416, message, "Range", "range_not_satisfiable", {"Content-Range": f"bytes */{length}"})
    return first, min(end, length, first + PAGE_BYTES)


def _too_large(length: int, headers: dict[str, str]) -> ApiError:
    message = (
        f"it has {length} bytes, and an answer has at most {PAGE_BYTES}: request pages, the first with "
        f"`Range: bytes=0-{PAGE_BYTES - 1}`, the others from where `Content-Range` ends, with `If-Match: <its ETag>`"
    )
    return ApiError(413, message, "Range", "range_required", headers)
