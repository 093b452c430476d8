"""The Prometheus text of all nodes, fetched at most once a second."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence

import httpx

logger = logging.getLogger("ray.serve")

UP = "vitrine_exporter_up"
OWN_PREFIX = ("ray_vitrine_", "ray_serve_", UP)
KEPT_PREFIXES = tuple(f"{start}{name}".encode() for name in OWN_PREFIX for start in ("", "# HELP ", "# TYPE "))
FRESH_S = 1.0  # how long a text is reused
READ_S = 5.0  # the longest time for an exporter's answer
MOST_BYTES = 32 << 20  # of an exporter's answer; Ray's own metrics of a node are under 1 MiB


class NodeMetrics:
    """The metrics of all nodes. Concurrent calls, and calls shortly after, share one result.

    Args:
        exporters: Returns the addresses of the nodes' exporters.
    """

    def __init__(self, exporters: Callable[[], Awaitable[Sequence[str]]]) -> None:
        self._exporters = exporters
        self._reading: asyncio.Task[bytes] | None = None
        self._fresh_until = 0.0

    async def text(self) -> bytes:
        """The text, at most a second old, without the nodes that do not answer in time or send too much."""
        if self._reading is None or self._reading.done() and time.monotonic() >= self._fresh_until:
            self._reading = asyncio.create_task(self._read())
        return await asyncio.shield(self._reading)  # other calls wait for it, too

    async def _read(self) -> bytes:
        try:
            exporters = await self._exporters()
            async with httpx.AsyncClient(trust_env=False) as client:
                texts = await asyncio.gather(*(_fetch(client, exporter) for exporter in exporters))
        finally:
            self._fresh_until = time.monotonic() + FRESH_S
        return await asyncio.to_thread(merge, [*texts, _up(exporters, texts)])


async def _fetch(client: httpx.AsyncClient, exporter: str) -> bytes:
    """An exporter's text; empty if it does not answer in time, or with too much."""
    text = bytearray()
    try:
        # Decompression would block the loop, and its output has no bound.
        async with (
            asyncio.timeout(READ_S),
            client.stream("GET", exporter, headers={"Accept-Encoding": "identity"}) as answer,
        ):
            answer.raise_for_status()
            async for part in answer.aiter_raw():
                text += part
                if len(text) > MOST_BYTES:
                    raise httpx.HTTPError(f"more than {MOST_BYTES} bytes")
    except (httpx.HTTPError, TimeoutError) as error:
        logger.warning("the metrics of %s cannot be read: %s", exporter, str(error) or type(error).__name__)
        return b""
    return bytes(text)


def _up(exporters: Sequence[str], texts: Sequence[bytes]) -> bytes:
    """The metric that says which exporters answered."""
    lines = [f"# HELP {UP} Whether a node's metrics could be read.", f"# TYPE {UP} gauge"]
    lines += [f'{UP}{{exporter="{url}"}} {int(bool(text))}' for url, text in zip(exporters, texts, strict=True)]
    return "\n".join(lines).encode()


def merge(texts: Iterable[bytes]) -> bytes:
    """Merge the texts: each metric's header once, only metrics of this project and of Serve.

    Lines are copied unchanged, because parsing takes a hundred times as long.

    Args:
        texts: The answers of the nodes' exporters.
    """
    families: dict[bytes, dict[bytes, bytes]] = {}  # name -> its lines; the two header lines occur once
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
