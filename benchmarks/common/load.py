"""The load generator: sends all requests at once from a process of its own, `python -m benchmarks.common.load`.

It parses nothing while requests run, so that a server on the same cores loses as little time as possible.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import aiohttp


def sent(url: str, bodies: Sequence[dict[str, Any]]) -> tuple[float, list[str]]:
    """Post bodies as JSON; gives the seconds from the first request's start to the last answer's end, and the answers.

    Raises:
        RuntimeError: One of them was not answered with 200.
    """
    command, job = [sys.executable, "-m", "benchmarks.common.load"], json.dumps([url, bodies])
    done = subprocess.run(command, input=job, stdout=subprocess.PIPE, text=True, check=True)
    seconds, answers = json.loads(done.stdout)
    for status, text in answers:
        if status != 200:
            raise RuntimeError(f"a request was answered with {status}: {text[:500]}")
    return seconds, [text for _, text in answers]


async def _send(url: str, bodies: Sequence[dict[str, Any]]) -> tuple[float, list[tuple[int, str]]]:
    encoded = [json.dumps(body).encode() for body in bodies]
    unlimited, connector = aiohttp.ClientTimeout(total=None), aiohttp.TCPConnector(limit=0)
    headers = {"content-type": "application/json"}
    async with aiohttp.ClientSession(timeout=unlimited, connector=connector, headers=headers) as session:

        async def one(body: bytes) -> tuple[int, str]:
            async with session.post(url, data=body) as answer:
                return answer.status, await answer.text()

        began = time.perf_counter()
        answers = await asyncio.gather(*map(one, encoded))
        return time.perf_counter() - began, answers


if __name__ == "__main__":
    json.dump(asyncio.run(_send(*json.load(sys.stdin))), sys.stdout)
