"""The load generator: sends all requests at once from its own process, and records the time of every read.

    python -m benchmarks.common.load < job.json > result.json

It parses nothing while requests run, so that a server on the same cores loses as little time as possible.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import aiohttp


@dataclass(frozen=True)
class Job:
    """What to send.

    Attributes:
        url: Where each body is posted.
        bodies: JSON objects.
        at_once: How many requests are on their way at any time.
        key: The API key; servers without keys read none.
    """

    url: str
    bodies: list[dict[str, Any]]
    at_once: int
    key: str


@dataclass(frozen=True)
class Exchange:
    """One request and its answer.

    Attributes:
        sent: Seconds after the first request was sent.
        status: HTTP's.
        reads: [reads] seconds after the first request, and what was read then.
    """

    sent: float
    status: int
    reads: list[tuple[float, str]]

    @property
    def end(self) -> float:
        """Seconds after the first request at which the last byte came."""
        return self.reads[-1][0] if self.reads else self.sent

    @property
    def body(self) -> str:
        """The whole answer."""
        return "".join(text for _, text in self.reads)


async def _post(session: aiohttp.ClientSession, url: str, body: bytes, began: float) -> Exchange:
    sent = time.perf_counter() - began
    reads: list[tuple[float, bytes]] = []
    async with session.post(url, data=body) as answer:
        async for data in answer.content.iter_any():
            reads.append((time.perf_counter() - began, data))
        # A character may be cut between two reads; each byte stands for itself until all are there.
        return Exchange(sent, answer.status, [(at, data.decode("latin-1")) for at, data in reads])


async def send(job: Job) -> list[Exchange]:
    """Send everything, `at_once` requests at a time, and give the answers in order."""
    bodies = [json.dumps(body).encode() for body in job.bodies]
    turns = asyncio.Semaphore(job.at_once)
    limits, headers = aiohttp.ClientTimeout(total=None), {"content-type": "application/json"}
    headers["authorization"] = f"Bearer {job.key}"
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=limits, headers=headers) as session:
        began = time.perf_counter()

        async def one(body: bytes) -> Exchange:
            async with turns:
                return await _post(session, job.url, body, began)

        return list(await asyncio.gather(*(one(body) for body in bodies)))


if __name__ == "__main__":
    exchanges = asyncio.run(send(Job(**json.load(sys.stdin))))
    json.dump([asdict(exchange) for exchange in exchanges], sys.stdout)
