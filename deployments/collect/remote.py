"""Sends examples to a server, many prompts per request."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from deployments.collect.examples import NAME_TAG, DataError, Example, Fields, InvalidExample, read, together
from deployments.collect.outcome import Outcome
from deployments.collect.settings import Settings
from vitrine.connection.blocking import wait
from vitrine.connection.transport import Transport, api_root, pause_s
from vitrine.runs.fetching import listed
from vitrine.server_error import RequestFailed, ServerError

IN_FLIGHT = 128  # prompts
TIMEOUT_S = 3600.0  # of a request: the server's own limit comes first
MAX_OUTAGE_S = 60.0
ATTEMPTS = 6  # of a request whose answer is lost
NAME = re.compile("run-[0-9a-f]{24}")  # as `Settings.name` makes it

Items = list[Example | InvalidExample | None]  # of a request; None is an example that is stored or repeated


def outcomes(
    data: Path | Iterable[Mapping[str, Any]], fields: Fields, settings: Settings, base_url: str
) -> Iterator[Outcome]:
    """The outcome of each request's examples, in the order of the answers.

    Args:
        data: A file, or rows.
        fields: Which fields of a row mean what.
        settings: The collection's settings.
        base_url: The server's URL, with or without `/v1`. The API key is `OPENAI_API_KEY`.

    Raises:
        DataError: The server cannot be reached, or rejects every request.
    """
    server = _server(base_url)
    made = _outcomes(read(data, fields), Collector(server, settings))

    async def following() -> Outcome | None:
        return await anext(made, None)

    try:
        while outcome := wait(following()):
            yield outcome
    except RequestFailed as error:
        raise DataError(f"--base-url {base_url}: {error}") from error
    finally:
        wait(made.aclose())
        wait(server.close())


def first_model(base_url: str) -> str:
    """The id of the first model that a server lists.

    Raises:
        DataError: It lists none, or cannot be reached.
    """
    server = _server(base_url)
    try:
        models = wait(server.get("/models"))["data"]
    except RequestFailed as error:
        raise DataError(f"--base-url {base_url}: {error}") from error
    finally:
        wait(server.close())
    if not models:
        raise DataError(f"--base-url {base_url}: the server serves no model: load one")
    return str(models[0]["id"])


def _server(base_url: str) -> Transport:
    key = os.environ.get("OPENAI_API_KEY")
    try:
        return Transport(api_root(base_url), key, TIMEOUT_S, max_outage=MAX_OUTAGE_S, parallel=IN_FLIGHT)
    except ValueError as error:
        raise DataError(f"--base-url: {error}") from error


async def _outcomes(items: Iterator[Example | InvalidExample], collector: Collector) -> AsyncGenerator[Outcome]:
    running: dict[asyncio.Task[Outcome], int] = {}
    try:
        for request in collector.requests(items, await collector.stored()):
            running[asyncio.create_task(collector.collect(request))] = len(request)
            while sum(running.values()) >= IN_FLIGHT:
                for task in (await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED))[0]:
                    del running[task]
                    yield task.result()
        for task in running:
            yield await task
    finally:
        for task in running:
            task.cancel()


def _number(name: str) -> int:
    """64 bits of an example's name; the chance that two of a million are equal is one in 36 million."""
    return int(name.removeprefix("run-")[:16], 16)


class Collector:
    """Sends examples to one server."""

    def __init__(self, server: Transport, settings: Settings) -> None:
        self._server = server
        self._settings = settings

    async def stored(self) -> set[int]:
        """The examples that earlier commands have stored in the session, by `_number`."""
        runs = listed(self._server, {"session": self._settings.session})
        return {_number(name) async for run in runs if NAME.fullmatch(name := run["tags"].get(NAME_TAG, ""))}

    def requests(self, items: Iterator[Example | InvalidExample], stored: set[int]) -> Iterator[Items]:
        """The examples of each request; apart from them the invalid ones, and None for each stored or repeated one.

        Args:
            items: The examples read.
            stored: Numbers of stored examples by `_number`; new ones are added.
        """
        while block := list(islice(items, self._settings.block)):
            examples, others = list[Example](), Items()
            for item in block:
                if isinstance(item, InvalidExample):
                    others.append(item)
                elif (number := _number(self._settings.name(item))) in stored:
                    others.append(None)
                else:
                    stored.add(number)
                    examples.append(item)
            if others:
                yield others
            for request in together(examples):
                yield [*request]

    async def collect(self, items: Items) -> Outcome:
        """Run examples on the server; returns the outcome."""
        outcome = Outcome(failures=[str(item) for item in items if isinstance(item, InvalidExample)])
        outcome.already_stored = sum(item is None for item in items)
        if examples := [item for item in items if isinstance(item, Example)]:
            outcome.began = time.time()
            await self._run(examples, outcome)
            outcome.ended = time.time()
        return outcome

    async def _run(self, examples: list[Example], outcome: Outcome, attempt: int = 1) -> None:
        """Run examples; if a request is rejected, run its examples one by one to find the failing one."""
        route = "/completions" if isinstance(examples[0].prompt, str) else "/chat/completions"
        try:
            answer = await self._server.post(route, self._body(examples), repeat=False)
        except RequestFailed as error:
            if not isinstance(error, ServerError) or error.status >= 500:
                await self._run_again(examples, outcome, attempt, error)
            elif len(examples) == 1:
                outcome.refuse(examples[0].place, error.message, error.param, error.status)
            else:
                for example in examples:
                    if not outcome.refusal:
                        await self._run([example], outcome)
            return
        for run in answer["activations_meta"]["runs"]:
            outcome.add(examples[run["index"]].place, run["status"], run.get("tokens", 0), run.get("reason"))

    async def _run_again(self, examples: list[Example], outcome: Outcome, attempt: int, lost: RequestFailed) -> None:
        """Run those examples of a request without an answer that are not stored nevertheless."""
        if attempt == ATTEMPTS:
            raise lost
        await asyncio.sleep(pause_s(attempt + 1))
        left = [example for example in examples if not await self._has(example)]
        outcome.already_stored += len(examples) - len(left)
        if left:
            await self._run(left, outcome, attempt + 1)

    async def _has(self, example: Example) -> bool:
        query = {"tag": f"{NAME_TAG}={self._settings.name(example)}", "limit": 1}
        return bool((await self._server.get("/activations/runs", query))["data"])

    def _body(self, examples: list[Example]) -> dict[str, Any]:
        settings = self._settings
        capture = settings.capture(examples).model_dump(mode="json", by_alias=True, exclude_unset=True)
        capture["tags"] = [example.tags | {NAME_TAG: settings.name(example)} for example in examples]
        prompts = [example.prompt for example in examples]
        asked = {"prompt": prompts} if isinstance(prompts[0], str) else {"messages": prompts[0]}
        fields = {"model": settings.model, "max_tokens": settings.max_tokens, "temperature": 0}
        return fields | asked | {"session_id": settings.session, "capture": capture}
