"""How much attacks slow down another client's short completion: `python -m benchmarks.serving.attacks`.

One client asks for eight tokens again and again over a connection of its own. Meanwhile another process sends requests
without a pause: in turn an attack, and an ordinary request of the same route and about the same size. An attack that is
a long prompt is compared with a plain prompt of as many tokens. The result is the client's latency under the attack
divided by its latency under the ordinary requests. The server has API keys and serves the shipped model, with a chat
template that writes tool calls as Llama 3 does.

Ends with 1 if a ratio at p50 is over 1.5.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from ctypes import c_int
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import httpx
from transformers import AutoTokenizer

from benchmarks.common import report, servers
from benchmarks.common.findings import Findings, parser_of
from benchmarks.common.servers import Server
from deployments.chat.response_templates import LLAMA
from deployments.demo_model import WEIGHTS
from deployments.interrupts import terminate_as_interrupt

MOST_RATIO = 1.5  # a ratio at p50
LIMIT_S = 120.0  # after which the client gives up; it counts as this long
KEY = "attacks-benchmark-key"
CHAT, SESSION = "/v1/chat/completions", "measured-by-attacks"
MIB = 2**20
PAGE = 4 * MIB  # where a server gives no more at once
FILLER = "The cat sat on the mat. "


@dataclass(frozen=True)
class Load:
    """What one process sends without a pause."""

    path: str
    body: bytes | None = None  # of a POST; without, it is a GET
    at_once: int = 1  # connections
    stalled: bool = False  # reads a little of each answer, and then nothing
    key: str = KEY
    pieces: int = 1  # how often the body is sent within one request, whose length is then not announced


@dataclass
class Latencies:
    """The client's, in seconds, and how often each status answered the load."""

    seconds: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)

    def summary(self) -> dict[str, Any]:
        """Percentiles in seconds, and the statuses of the load."""
        parts = statistics.quantiles(self.seconds * 2, n=100, method="inclusive")
        found = {"p50": parts[49], "p95": parts[94], "worst": max(self.seconds), "count": len(self.seconds)}
        return found | {"statuses": dict(self.statuses)}


def loads() -> dict[str, tuple[Load, Load]]:
    """Name of an attack -> an ordinary request's load, and the attack's."""
    tokenizer = AutoTokenizer.from_pretrained(WEIGHTS)
    space, letter = (tokenizer(text, add_special_tokens=False)["input_ids"][0] for text in (" ", "a"))
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}

    def chat(**more: Any) -> bytes:
        asked = {"model": "measured", "messages": [{"role": "user", "content": "Go"}], "max_tokens": 8}
        return json.dumps(asked | more).encode()

    def message_of(size: int) -> Load:
        text = (FILLER * (size // len(FILLER) + 1))[:size]
        return Load(CHAT, chat(messages=[{"role": "user", "content": text}]))

    def reads(tokens: int) -> Load:
        each = len(tokenizer(FILLER, add_special_tokens=False)["input_ids"])
        return message_of(tokens // each * len(FILLER))

    def writes(token: int, **more: Any) -> Load:
        return Load(CHAT, chat(tools=[tool], logit_bias={str(token): 100}, max_tokens=1000, **more))

    half, large, data = MIB // 2, 15 * MIB, f"/v1/activations/session/{SESSION}/data"
    deep = b'{"model": "measured", "messages": ' + b"[" * half + b"]" * half + b"}"
    numbers = {**tool, "function": {"name": "f", "parameters": {"x": [1] * 6000}}}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    calls = chat(messages=[{"role": "user", "content": "Go"}, {"role": "assistant", "tool_calls": [call] * 200}])
    noted = chat(messages=[{"role": "user", "content": "Go", "annotations": [1] * 1024}] * 5)
    tags = "&".join(f"tag=t{number}=x" for number in range(1000))
    kwargs = {f"k{number}": "x" * 400 for number in range(32)}
    return {
        "spaces with tools, whole": (writes(letter), writes(space)),
        "spaces with tools, streamed": (writes(letter, stream=True), writes(space, stream=True)),
        "half a MiB of wrong messages": (message_of(half), Load(CHAT, chat(messages=[1] * (half // 3)))),
        "15 MiB of wrong messages": (message_of(large), Load(CHAT, chat(messages=[1] * (large // 3)))),
        "right: 55 tools": (message_of(MIB), Load(CHAT, chat(tools=[numbers] * 55))),
        "right: tool calls": (reads(4000), Load(CHAT, calls)),
        "right: annotations": (message_of(len(noted)), Load(CHAT, noted)),
        "deep JSON": (message_of(MIB), Load(CHAT, deep)),
        "many unknown keys": (message_of(MIB), Load(CHAT, chat(**{f"key{number}": 1 for number in range(MIB // 14)}))),
        "an oversized body": (message_of(large), Load(CHAT, b" " * MIB, pieces=64)),
        "chat_template_kwargs": (message_of(13_000), Load(CHAT, chat(chat_template_kwargs=kwargs))),
        "wrong keys": (Load("/v1/models", at_once=8), Load("/v1/models", at_once=8, key="wrong")),
        "/metrics": (Load("/v1/models", at_once=8), Load("/metrics", at_once=8)),
        "forty stalled downloads": (Load(data), Load(data, at_once=40, stalled=True)),
        "1,000 tags": (Load("/v1/activations/runs?tag=t=x"), Load(f"/v1/activations/runs?{tags}")),
    }


async def _send(root: str, load: Load, statuses: Any) -> None:
    headers = {"authorization": f"Bearer {load.key}", "content-type": "application/json"}
    connector, limits = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(None)
    async with aiohttp.ClientSession(root, headers=headers, connector=connector, timeout=limits) as session:
        await asyncio.gather(*(_without_pause(session, load, statuses) for _ in range(load.at_once)))


async def _without_pause(session: aiohttp.ClientSession, load: Load, statuses: Any) -> None:
    more: dict[str, str] = {}
    while True:
        try:
            body = load.body if load.pieces == 1 else _pieces(load)
            async with session.request("GET" if body is None else "POST", load.path, data=body, headers=more) as answer:
                statuses[answer.status] += 1
                if answer.status == 413 and body is None and not more:
                    more = {"range": f"bytes=0-{PAGE - 1}"}
                elif load.stalled and answer.ok:
                    await answer.content.readexactly(65536)
                    await asyncio.Event().wait()
                await answer.read()
        except (aiohttp.ClientError, asyncio.IncompleteReadError, OSError):
            statuses[0] += 1
            await asyncio.sleep(0.05)


async def _pieces(load: Load) -> AsyncIterator[bytes]:
    for _ in range(load.pieces):
        yield load.body or b""


def send(root: str, load: Load, statuses: Any) -> None:
    """Send a load until this process is killed."""
    asyncio.run(_send(root, load, statuses))


@contextlib.contextmanager
def under_load(root: str, load: Load) -> Iterator[Any]:
    """Send a load from a process of its own; gives how often each status came, 0 for a connection that broke."""
    context = multiprocessing.get_context("spawn")
    statuses = context.Array(c_int, 600)
    process = context.Process(target=send, args=(root, load, statuses), daemon=True)
    process.start()
    try:
        time.sleep(3)  # it imports, connects and sends
        yield statuses
    finally:
        process.kill()
        process.join()


def client_of(root: str) -> httpx.Client:
    """A client with the key that the attacks have, too."""
    return httpx.Client(base_url=root, headers={"authorization": f"Bearer {KEY}"}, timeout=LIMIT_S)


def short(client: httpx.Client) -> float:
    """Seconds that a completion of eight tokens takes; the limit where it fails."""
    body = {"model": "measured", "prompt": "Two and two", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    began = time.perf_counter()
    try:
        client.post("/v1/completions", json=body).raise_for_status()
    except httpx.HTTPError:
        return LIMIT_S
    return time.perf_counter() - began


def measure(root: str, load: Load, seconds: float, into: Latencies) -> None:
    """Note the seconds of short completions beside a load, and wait until the server is rid of it."""
    with client_of(root) as client:
        short(client)
        with under_load(root, load) as statuses:
            until = time.perf_counter() + seconds
            into.seconds.append(short(client))
            while time.perf_counter() < until:
                into.seconds.append(short(client))
            into.statuses.update({status: count for status, count in enumerate(statuses) if count})
        for _ in range(3):
            short(client)


def record(server: Server) -> None:
    """Store a session of eight long prompts, which takes long to download."""
    body = {"model": server.model, "prompt": FILLER * 300, "max_tokens": 1, "session_id": SESSION}
    with client_of(server.root) as client:
        for _ in range(8):
            client.post("/v1/completions", json=body | {"store_activations": True}).raise_for_status()


def table(found: dict[str, dict[str, Any]]) -> str:
    """A table with a row for each attack: the client's milliseconds beside both loads, and their ratios."""
    rows = []
    for name, one in found.items():
        sides = [f"{1000 * one[side][part]:.0f}" for side in ("ordinary", "attack") for part in ("p50", "p95", "worst")]
        rows.append([name, *sides, f"{one['ratio_p50']:.2f}", f"{one['ratio_p95']:.2f}"])
    head = ["ms beside", *[f"{side} {part}" for side in ("ordinary", "attack") for part in ("p50", "p95", "worst")]]
    return report.table("a completion of eight tokens", [*head, "p50 ratio", "p95 ratio"], rows)


def run(server: Server, pairs: dict[str, tuple[Load, Load]], options: Any, findings: Findings) -> None:
    """Measure the client's latency beside each attack and its ordinary request."""
    found: dict[str, dict[str, Any]] = {}
    for name, pair in pairs.items():
        sides = [Latencies(), Latencies()]
        for number in range(options.rounds):
            for side in (0, 1) if number % 2 == 0 else (1, 0):
                measure(server.root, pair[side], options.seconds, sides[side])
        ordinary, attack = (side.summary() for side in sides)
        found[name] = {"ordinary": ordinary, "attack": attack}
        found[name] |= {f"ratio_{part}": attack[part] / ordinary[part] for part in ("p50", "p95")}
        print(f"{name}: {found[name]['ratio_p50']:.2f} at p50; answered {attack['statuses']}", flush=True)
        findings.add("attacks", name, found[name])
        if name.startswith("right") and set(attack["statuses"]) != {200}:
            findings.failed.append(f"{name}: it was answered {attack['statuses']}, not 200 alone")
        if found[name]["ratio_p50"] > MOST_RATIO:
            findings.failed.append(f"{name}: {found[name]['ratio_p50']:.2f} times as long at p50, over {MOST_RATIO}")
    print(table(found))


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write the results; gives the exit status."""
    terminate_as_interrupt()
    parser = parser_of(__doc__, "benchmark-attacks", rounds=3)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each turn")
    parser.add_argument("--only", action="append", help="a part of an attack's name; again for more than one")
    options = parser.parse_args(arguments)
    findings = Findings(options)
    with tempfile.TemporaryDirectory(prefix="vt-attacks-") as name:
        model = Path(shutil.copytree(WEIGHTS, Path(name) / "model"))
        config = json.loads((model / "tokenizer_config.json").read_text())
        config["response_template"]["fields"] = {"tool_calls": LLAMA, "content": {}}
        (model / "tokenizer_config.json").write_text(json.dumps(config))
        wanted = {name: pair for name, pair in loads().items() if any(part in name for part in options.only or [""])}
        with servers.vitrine(model, flags={"VITRINE_API_KEYS": f"admin:{KEY}"}) as server:
            record(server)
            run(server, wanted, options, findings)
    return findings.close()


if __name__ == "__main__":
    sys.exit(main())
