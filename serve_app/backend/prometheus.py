"""The Prometheus text of all nodes as one text, fetched at most once a second."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence

import httpx

from serve_app.http.errors import ApiError

OWN_PREFIX = ("ray_vitrine_", "ray_serve_")
KEPT_PREFIXES = tuple(f"{start}{name}".encode() for name in OWN_PREFIX for start in ("", "# HELP ", "# TYPE "))
FRESH_S = 1.0  # for which a text is returned again
READ_S = 5.0  # the longest that an exporter may take for all of it
MOST_BYTES = 32 << 20  # of an exporter; Ray's own numbers of a node are under 1 MiB


class NodeMetrics:
    """The metrics of all nodes. Concurrent calls, and calls shortly after, share one result.

    Args:
        exporters: Finds the addresses of the nodes' exporters.
    """

    def __init__(self, exporters: Callable[[], Awaitable[Sequence[str]]]) -> None:
        self._exporters = exporters
        self._reading: asyncio.Task[bytes] | None = None
        self._fresh_until = 0.0

    async def text(self) -> bytes:
        """The text, at most a second old.

        Raises:
            ApiError: 503, where an exporter does not answer, or without end.
        """
        if self._reading is None or self._reading.done() and time.monotonic() >= self._fresh_until:
            self._reading = asyncio.create_task(self._read())
        return await asyncio.shield(self._reading)  # others wait for it, too

    async def _read(self) -> bytes:
        try:
            async with asyncio.timeout(READ_S), httpx.AsyncClient(trust_env=False) as client:
                texts = await asyncio.gather(*(_fetch(client, one) for one in await self._exporters()))
        except (httpx.HTTPError, TimeoutError) as error:
            why = str(error) or type(error).__name__
            raise ApiError(503, f"a node's metrics cannot be read: {why}", code="unavailable") from error
        finally:
            self._fresh_until = time.monotonic() + FRESH_S
        return await asyncio.to_thread(merge, texts)


async def _fetch(client: httpx.AsyncClient, exporter: str) -> bytes:
    text = bytearray()
    # Unpacking would hold the loop up, and has no bound.
    async with client.stream("GET", exporter, headers={"Accept-Encoding": "identity"}) as answer:
        answer.raise_for_status()
        async for part in answer.aiter_raw():
            text += part
            if len(text) > MOST_BYTES:
                raise ApiError(503, f"a node's metrics are more than {MOST_BYTES} bytes", code="unavailable")
    return bytes(text)


def merge(texts: Iterable[bytes]) -> bytes:
    """One text with each metric's head once, of this project's metrics and Serve's own.

    Lines are copied as they are: to parse them took a hundred times as long.

    Args:
        texts: What each node's exporter says.
    """
    families: dict[bytes, dict[bytes, bytes]] = {}  # by name its lines, of which the head's two are there once
    for text in texts:
        family: dict[bytes, bytes] = {}
        for line in text.split(b"\n"):
            if line.startswith(KEPT_PREFIXES):
                if line.startswith(b"#"):
                    _, kind, name, *_ = line.split(b" ", 3)
                    family = families.setdefault(name, {})
                    family.setdefault(kind, line)
                else:
                    family[line] = line
    return b"".join(line + b"\n" for family in families.values() for line in family.values())
