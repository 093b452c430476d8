"""Clients that send streams and recording requests all the time, and a ledger of what became of each."""

from __future__ import annotations

import asyncio
import json
import random
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.chaos.cluster import REQUEST_S, SERVER, Chaos

CLIENTS = 6
PAUSE_S = 0.2  # of a client between two requests
LIMIT_S = REQUEST_S + 30  # for a request as its client sees it
PROMPTS = [f"{number} apples and {2 * number} pears" for number in range(3, 15)]
CAPTURE = {"layers": [0, 3], "sites": ["output"], "tokens": "all"}
REFUSED = (429, 503, 504)
# Codes of these, within a stream.
CUTS = {"unavailable", "timeout", "not_started", "server_busy", "store_unavailable", "capture_failed"}


@dataclass
class Sent:
    """One request.

    Attributes:
        prompt: The index of its prompt.
        records: Whether its activations are to be stored.
        streams: Whether its answer is streamed.
        requires: Whether it is to fail where they are not stored.
        id: Its X-Request-Id.
        at: When it was sent, on the monotonic clock.
        took_s: The time until its end.
        outcome: `whole`, a status, `cut` for a stream that ended with an error, or `broken` for a connection; else what
            is wrong.
        run: Its run, as answered.
    """

    prompt: int
    records: bool = False
    streams: bool = False
    requires: bool = False
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    at: float = field(default_factory=time.monotonic)
    took_s: float = 0.0
    outcome: str = "open"
    text: str = ""
    run: dict[str, Any] | None = None

    @property
    def good(self) -> bool:
        return self.outcome == "whole"

    def body(self, session: str) -> dict[str, Any]:
        body = {"model": "vitrine-demo", "prompt": PROMPTS[self.prompt], "max_tokens": 150, "temperature": 0}
        body |= {"stream": self.streams, "ignore_eos": True}
        capture = CAPTURE | {"sample_id": self.id, "required": self.requires}
        return body | ({"session_id": session, "capture": capture} if self.records else {})


class Load:
    """Sends from `start` until `stop`.

    Attributes:
        session: The session of what is recorded.
        ledger: All requests.
    """

    def __init__(self, cluster: Chaos, session: str, seed: int, texts: Sequence[str]) -> None:
        """`texts` are the prompts' answers."""
        self.session = session
        self.ledger: list[Sent] = []
        self._cluster, self._seed, self._texts = cluster, seed, texts
        self._ends = False
        self._running: Future[None] | None = None

    def start(self) -> None:
        self._running = self._cluster.client(lambda: asyncio.run(self._send()))

    def stop(self) -> None:
        """Wait for the requests that are on their way."""
        self._ends = True
        assert self._running is not None
        self._running.result(LIMIT_S + 60)

    def good(self, since: float) -> list[Sent]:
        """Whole answers of requests that were sent after a time, in the order of their ends."""
        found = [sent for sent in list(self.ledger) if sent.good and sent.at >= since]
        return sorted(found, key=lambda sent: sent.at + sent.took_s)

    async def _send(self) -> None:
        await asyncio.gather(*(self._client(random.Random(f"{self._seed} {number}")) for number in range(CLIENTS)))

    async def _client(self, draw: random.Random) -> None:
        async with httpx.AsyncClient(base_url=SERVER, headers=self._cluster.headers, timeout=None) as http:
            while not self._ends:
                records, streams = draw.choice([(True, False), (False, True), (True, True)])
                sent = Sent(draw.randrange(len(PROMPTS)), records, streams, requires=draw.random() < 0.5)
                self.ledger.append(sent)
                await ask(http, sent, self.session)
                sent.took_s = time.monotonic() - sent.at
                if sent.good and sent.text != self._texts[sent.prompt]:
                    sent.outcome = f"another text: {sent.text!r}"
                elif sent.outcome == "cut" and not self._texts[sent.prompt].startswith(sent.text):
                    sent.outcome = f"cut after another text: {sent.text!r}"
                await asyncio.sleep(PAUSE_S if sent.good else 5 * PAUSE_S)


async def ask(http: httpx.AsyncClient, sent: Sent, session: str = "") -> None:
    """Send a request, and note its outcome."""
    try:
        async with asyncio.timeout(LIMIT_S):
            headers = {"X-Request-Id": sent.id}
            call = http.stream("POST", "/v1/completions", json=sent.body(session), headers=headers)
            async with call as answer:
                if answer.status_code == 200 and sent.streams:
                    await _follow(answer, sent)
                    return
                said = await answer.aread()
        if answer.status_code == 200:
            body = json.loads(said)
            _note(sent, body)
            sent.outcome = "whole"
        else:
            known = answer.status_code in REFUSED
            sent.outcome = str(answer.status_code) if known else f"{answer.status_code}: {said.decode()}"
    except TimeoutError:
        sent.outcome = f"late: no end after {LIMIT_S} s"
    except httpx.TransportError:
        sent.outcome = "broken"


async def _follow(answer: httpx.Response, sent: Sent) -> None:
    sent.outcome = "broken"  # if it ends without more
    async for line in answer.aiter_lines():
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            sent.outcome = "whole"
        elif data:
            body = json.loads(data)
            if error := body.get("error"):
                sent.outcome = "cut" if error["code"] in CUTS else f"cut by {error}"
                return
            _note(sent, body)


def _note(sent: Sent, body: dict[str, Any]) -> None:
    sent.text += "".join(choice["text"] for choice in body["choices"])
    if meta := body.get("activations_meta"):
        [sent.run] = meta["runs"]
