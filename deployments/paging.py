"""Fetching a download page by page, for any HTTP client. Needs no Arrow."""

from __future__ import annotations

import re
from collections.abc import Mapping

PAGE_BYTES = 8 << 20  # that are asked for at once; a server may send less
_SPAN = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})", re.ASCII)


class NoPageError(ValueError):
    """An answer that is not the next page of the download."""


class Paging:
    """How much of a download has come, and what to ask for next; `length` is 0 until the first page has come."""

    def __init__(self) -> None:
        self.length, self._tag, self._next = 0, "", 0

    @property
    def is_whole(self) -> bool:
        """Whether all of it has come."""
        return 0 < self.length == self._next

    @property
    def headers(self) -> dict[str, str]:
        """Those of the request for the next page."""
        # Compressed, a range would be of what is compressed.
        asked = {"Range": f"bytes={self._next}-{self._next + PAGE_BYTES - 1}", "Accept-Encoding": "identity"}
        return asked | ({"If-Match": self._tag} if self._tag else {})

    def size(self, headers: Mapping[str, str]) -> int:
        """The bytes of an answer of status 206, at most `PAGE_BYTES`; NoPageError if it is not the next page."""
        span = _SPAN.fullmatch(headers.get("content-range", ""))
        first, last, length = map(int, span.groups()) if span else (0, -1, 0)
        tag, size = headers.get("etag", ""), last + 1 - first
        if not tag or first != self._next or not 0 < size <= PAGE_BYTES or last >= length:
            raise NoPageError(f"the answer is no page of a download from byte {self._next} on")
        if self._tag and (tag, length) != (self._tag, self.length):
            raise NoPageError(f"from byte {self._next} on the answer is of something else than the pages before")
        return size

    def take(self, headers: Mapping[str, str], page: bytes) -> bytes:
        """Take an answer's bytes as the next page; NoPageError as of `size`, or if they are more or fewer."""
        if len(page) != (size := self.size(headers)):
            raise NoPageError(f"the answer has {len(page)} bytes and says that there are {size}")
        self._next += size
        self._tag, self.length = headers["etag"], int(headers["content-range"].rpartition("/")[2])
        return page
