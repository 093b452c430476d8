"""Sends examples to a server, many prompts per request."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import islice
from pathlib import Path
from typing import Any

import httpx

from deployments.collect.examples import NAME_TAG, DataError, Example, Fields, InvalidExample, read, together
from deployments.collect.outcome import Outcome
from deployments.collect.settings import Settings

IN_FLIGHT = 128  # prompts
PAGE = 1000  # runs that a server lists at once
TIMEOUT_S = 3600.0  # of a request: the server's own limit comes first
ATTEMPTS = 6
PAUSE_S = 30.0  # at most, between two attempts
NAME = re.compile("run-[0-9a-f]{24}")  # as `Settings.name` makes it


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
    with _client(base_url) as http:
        server = Server(http)
        collector = Collector(server, settings)
        requests = _requests(read(data, fields), settings, collector.stored())
        pool = ThreadPoolExecutor(IN_FLIGHT)
        running: dict[Future[Outcome], int] = {}
        try:
            for request in requests:
                running[pool.submit(collector.collect, request)] = len(request)
                while sum(running.values()) >= IN_FLIGHT:
                    for future in wait(running, return_when=FIRST_COMPLETED).done:
                        del running[future]
                        yield future.result()
            yield from (future.result() for future in running)
        finally:
            server.stop()
            pool.shutdown(wait=False, cancel_futures=True)


def first_model(base_url: str) -> str:
    """The id of the first model that a server lists.

    Raises:
        DataError: It lists none, or cannot be reached.
    """
    with _client(base_url) as http:
        models = _json(Server(http).get("/v1/models", {}))["data"]
    if not models:
        raise DataError(f"--base-url {base_url}: the server serves no model: load one")
    return str(models[0]["id"])


def _client(base_url: str) -> httpx.Client:
    key = os.environ.get("OPENAI_API_KEY")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.Client(base_url=base_url.rstrip("/").removesuffix("/v1"), headers=headers, timeout=TIMEOUT_S)


def _requests(
    items: Iterator[Example | InvalidExample], settings: Settings, stored: set[int]
) -> Iterator[list[Example | InvalidExample | None]]:
    """The examples of each request; apart from them the invalid ones, and None for each stored or repeated one.

    Args:
        items: The examples read.
        settings: The collection's settings.
        stored: Numbers of stored examples by `_number`; new ones are added.
    """
    while block := list(islice(items, settings.block)):
        examples, others = list[Example](), list[InvalidExample | None]()
        for item in block:
            if isinstance(item, InvalidExample):
                others.append(item)
            elif (number := _number(settings.name(item))) in stored:
                others.append(None)
            else:
                stored.add(number)
                examples.append(item)
        if others:
            yield [*others]
        for request in together(examples):
            yield [*request]


def _number(name: str) -> int:
    """64 bits of an example's name; the chance that two of a million are equal is one in 36 million."""
    return int(name.removeprefix("run-")[:16], 16)


class Collector:
    """Sends examples to one server. Safe to call from any thread."""

    def __init__(self, server: Server, settings: Settings) -> None:
        self._server = server
        self._settings = settings

    def stored(self) -> set[int]:
        """The examples that earlier commands have stored in the session, by `_number`."""
        found, after = set[int](), None
        while True:
            query = {"limit": PAGE} | ({"after": after} if after else {})
            answer = self._server.get(f"/v1/activations/session/{self._settings.session}", query)
            if answer.status_code == 404:
                return found
            page = _json(answer)
            names = (run["tags"].get(NAME_TAG, "") for run in page["runs"])
            found.update(_number(name) for name in names if NAME.fullmatch(name))
            if not page["has_more"]:
                return found
            after = page["runs"][-1]["run_id"]

    def collect(self, items: list[Example | InvalidExample | None]) -> Outcome:
        """Run examples on the server; returns the outcome."""
        outcome = Outcome(failures=[str(item) for item in items if isinstance(item, InvalidExample)])
        outcome.already_stored = sum(item is None for item in items)
        if examples := [item for item in items if isinstance(item, Example)]:
            outcome.began = time.time()
            self._run(examples, outcome)
            outcome.ended = time.time()
        return outcome

    def _run(self, examples: list[Example], outcome: Outcome, attempt: int = 1) -> None:
        """Run examples; if a request is rejected, run its examples one by one to find the failing one."""
        route = "/v1/completions" if isinstance(examples[0].prompt, str) else "/v1/chat/completions"
        try:
            answer = self._server.post(route, self._body(examples))
            lost = f"{answer.url}: {_error(answer)[0]}" if answer.status_code >= 500 else None
        except httpx.TransportError as error:
            lost = str(error) or type(error).__name__
        if lost:
            self._server.wait(attempt, lost)
            left = [example for example in examples if not self._has(example)]  # the runs may exist nevertheless
            outcome.already_stored += len(examples) - len(left)
            if left:
                self._run(left, outcome, attempt + 1)
        elif answer.status_code == 200:
            for run in _json(answer)["activations_meta"]["runs"]:
                outcome.add(examples[run["index"]].place, run["status"], run.get("tokens", 0), run.get("reason"))
        elif len(examples) > 1:
            for example in examples:
                if not outcome.refusal:
                    self._run([example], outcome)
        else:
            message, field = _error(answer)
            outcome.refuse(examples[0].place, message, field, answer.status_code)

    def _has(self, example: Example) -> bool:
        query = {"tag": f"{NAME_TAG}={self._settings.name(example)}", "limit": 1}
        return bool(_json(self._server.get("/v1/activations/runs", query))["data"])

    def _body(self, examples: list[Example]) -> dict[str, Any]:
        settings = self._settings
        capture = settings.capture(examples).model_dump(mode="json", by_alias=True, exclude_unset=True)
        capture["tags"] = [example.tags | {NAME_TAG: settings.name(example)} for example in examples]
        prompts = [example.prompt for example in examples]
        asked = {"prompt": prompts} if isinstance(prompts[0], str) else {"messages": prompts[0]}
        fields = {"model": settings.model, "max_tokens": settings.max_tokens, "temperature": 0}
        return fields | asked | {"session_id": settings.session, "capture": capture}


class Server:
    """A server that may be busy or temporarily offline."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Stop all waiting."""
        self._stopped.set()

    def get(self, path: str, query: dict[str, Any]) -> httpx.Response:
        """Get an answer, after a few attempts.

        Raises:
            DataError: The server cannot be reached.
        """
        for attempt in range(1, ATTEMPTS + 1):
            try:
                answer = self._answer(lambda: self._http.get(path, params=query))
                if answer.status_code < 500:
                    return answer
                lost = _error(answer)[0]
            except httpx.UnsupportedProtocol as error:
                raise DataError(f"--base-url {self._http.base_url}: {error}") from error
            except httpx.TransportError as error:
                lost = str(error) or type(error).__name__
            self.wait(attempt, lost)
        raise AssertionError("the last attempt returns or raises")

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """Send a request that must not be repeated, because part of it may have been done.

        Raises:
            httpx.TransportError: The connection broke.
        """
        return self._answer(lambda: self._http.post(path, json=body))

    def wait(self, attempt: int, why: str) -> None:
        """Wait before the next attempt.

        Raises:
            DataError: There are no attempts left.
        """
        if attempt >= ATTEMPTS or self._stopped.wait(min(PAUSE_S, 2.0**attempt)):
            raise DataError(f"--base-url {self._http.base_url}: the server does not answer: {why}")

    def _answer(self, send: Callable[[], httpx.Response]) -> httpx.Response:
        """Send a request; retry if the server is too busy to start it."""
        for attempt in range(1, ATTEMPTS):
            answer = send()
            if answer.status_code != 429:
                return answer
            pause = 2.0**attempt
            with contextlib.suppress(ValueError):  # a date
                pause = float(answer.headers.get("retry-after", pause))
            self._stopped.wait(min(PAUSE_S, pause))
        return send()


def _json(answer: httpx.Response) -> dict[str, Any]:
    if answer.status_code != 200:
        raise DataError(f"{answer.url}: {_error(answer)[0]}")
    found: dict[str, Any] = answer.json()
    return found


def _error(answer: httpx.Response) -> tuple[str, str | None]:
    """A server's error message, and the field that it names."""
    try:
        error = answer.json()["error"]
        return f"HTTP {answer.status_code}: {error['message']}", error.get("param")
    except (ValueError, LookupError, TypeError, AttributeError):
        return f"HTTP {answer.status_code}", None
