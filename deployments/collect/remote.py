"""Examples through a server, many prompts a request."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import islice
from pathlib import Path
from typing import Any

import httpx

from deployments.collect.examples import Broken, DataError, Example, Fields, read
from deployments.collect.outcome import Outcome
from deployments.collect.settings import Settings

AT_ONCE = 32  # prompts of a request
IN_FLIGHT = 4  # requests
PAGE = 1000  # runs that a server lists at once
TIMEOUT_S = 600.0  # of a request
ATTEMPTS = 6
PAUSE_S = 30.0  # at most, between two attempts
TAG = "collected"  # of a run: what tells that it is this example's, recorded like this
AGAIN = (429, 502, 503, 504)  # statuses after which the same request may succeed


def outcomes(
    data: Path | Iterable[Mapping[str, Any]], fields: Fields, settings: Settings, base_url: str
) -> Iterator[Outcome]:
    """What becomes of each request's examples, as they are answered.

    Args:
        data: A file, or rows.
        fields: Which fields of a row mean what.
        settings: What is recorded.
        base_url: The server's, with or without `/v1`. `OPENAI_API_KEY` holds its API key.

    Raises:
        DataError: The server cannot be reached, or refuses every request.
    """
    with _client(base_url) as http, ThreadPoolExecutor(IN_FLIGHT) as pool:
        server = Collector(Server(http), settings)
        requests = _requests(read(data, fields), settings, server.stored())
        running: set[Future[Outcome]] = set()
        try:
            for request in requests:
                running.add(pool.submit(server.collect, request))
                if len(running) == IN_FLIGHT:
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                    yield from (future.result() for future in done)
            yield from (future.result() for future in running)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def first_model(base_url: str) -> str:
    """The id of the first model that a server lists.

    Raises:
        DataError: It lists none, or cannot be reached.
    """
    with _client(base_url) as http:
        models = _json(Server(http).get("/v1/models", {}))["data"]
    if not models:
        raise DataError(f"--base-url {base_url}: the server has no model: load one")
    return str(models[0]["id"])


def _client(base_url: str) -> httpx.Client:
    key = os.environ.get("OPENAI_API_KEY")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.Client(base_url=base_url.rstrip("/").removesuffix("/v1"), headers=headers, timeout=TIMEOUT_S)


def _requests(
    items: Iterator[Example | Broken], settings: Settings, stored: set[int]
) -> Iterator[list[Example | Broken | None]]:
    """The examples of each request; None for one that is stored already. A chat goes alone."""
    texts: list[Example | Broken | None] = []
    while block := list(islice(items, settings.block)):
        texts = []
        for item in block:
            known = isinstance(item, Example) and _number(settings.run_id(item)) in stored
            if isinstance(item, Example) and not known and not isinstance(item.prompt, str):
                yield [item]
            else:
                texts.append(None if known else item)
        # Prompts of like lengths share a forward.
        texts.sort(key=lambda item: len(item.prompt) if isinstance(item, Example) else 0)
        yield from (texts[first : first + AT_ONCE] for first in range(0, len(texts), AT_ONCE))


def _number(run_id: str) -> int:
    """64 bits of a run's name: of a million, no two are alike but by a chance of one in 36 million."""
    return int(run_id.removeprefix("run-")[:16], 16)


class Collector:
    """What one server is asked. Any thread may call."""

    def __init__(self, server: Server, settings: Settings) -> None:
        self._server = server
        self._settings = settings

    def stored(self) -> set[int]:
        """What the session holds of earlier commands, as `_number` has it."""
        found, after = set[int](), None
        while True:
            query = {"limit": PAGE} | ({"after": after} if after else {})
            answer = self._server.get(f"/v1/activations/session/{self._settings.session}", query)
            if answer.status_code == 404:
                return found
            page = _json(answer)
            found.update(_number(run["tags"][TAG]) for run in page["runs"] if TAG in run["tags"])
            if not page["has_more"]:
                return found
            after = page["runs"][-1]["run_id"]

    def collect(self, items: list[Example | Broken | None]) -> Outcome:
        """Have examples run, and say what became of them."""
        outcome = Outcome(failures=[str(item) for item in items if isinstance(item, Broken)])
        outcome.already_stored = sum(item is None for item in items)
        outcome.began = time.time()
        if examples := [item for item in items if isinstance(item, Example)]:
            self._run(examples, outcome)
        outcome.ended = time.time()
        return outcome

    def _run(self, examples: list[Example], outcome: Outcome, attempt: int = 1) -> None:
        """Have examples run; those of a request that is refused one by one, to find whose fault it is."""
        route = "/v1/completions" if isinstance(examples[0].prompt, str) else "/v1/chat/completions"
        try:
            answer = self._server.post(route, self._body(examples))
        except httpx.TransportError as error:
            self._server.wait(attempt, error)
            left = [example for example in examples if not self._has(example)]  # an answer was lost, perhaps no run
            outcome.already_stored += len(examples) - len(left)
            if left:
                self._run(left, outcome, attempt + 1)
            return
        if answer.status_code == 200:
            for run in _json(answer)["activations_meta"]["runs"]:
                if run["status"] == "stored":
                    outcome.add(run["tokens"])
                else:
                    outcome.failures.append(f"{examples[run['index']].place}: {run.get('reason')}")
        elif answer.status_code in (401, 403, 404):
            raise DataError(f"{answer.url}: {_message(answer)}")
        elif len(examples) > 1:
            for example in examples:
                self._run([example], outcome)
        else:
            outcome.failures.append(f"{examples[0].place}: {_message(answer)}")

    def _has(self, example: Example) -> bool:
        query = {"tag": f"{TAG}={self._settings.run_id(example)}", "limit": 1}
        return bool(_json(self._server.get("/v1/activations/runs", query))["data"])

    def _body(self, examples: list[Example]) -> dict[str, Any]:
        settings = self._settings
        capture = settings.capture(examples).model_dump(mode="json", by_alias=True, exclude_unset=True)
        capture["tags"] = [example.tags | {TAG: settings.run_id(example)} for example in examples]
        prompts = [example.prompt for example in examples]
        asked = {"prompt": prompts} if isinstance(prompts[0], str) else {"messages": prompts[0]}
        fields = {"model": settings.model, "max_tokens": settings.max_tokens, "temperature": 0}
        return fields | asked | {"session_id": settings.session, "capture": capture}


class Server:
    """A server that may be away for a while, or busy."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http

    def get(self, path: str, query: dict[str, Any]) -> httpx.Response:
        """An answer to what may be asked twice.

        Raises:
            DataError: The server cannot be reached.
        """
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return self._answer(lambda: self._http.get(path, params=query))
            except httpx.TransportError as error:
                self.wait(attempt, error)
        raise AssertionError("the last attempt returns or raises")

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """An answer to what must not be asked twice.

        Raises:
            httpx.TransportError: It was lost.
        """
        return self._answer(lambda: self._http.post(path, json=body))

    def wait(self, attempt: int, error: httpx.TransportError) -> None:
        """Wait before the next attempt.

        Raises:
            DataError: That was the last.
        """
        if attempt == ATTEMPTS:
            raise DataError(f"--base-url {self._http.base_url}: the server cannot be reached: {error}") from error
        time.sleep(min(PAUSE_S, 2.0**attempt))

    def _answer(self, send: Callable[[], httpx.Response]) -> httpx.Response:
        """An answer; where the server asks to wait, after a few attempts."""
        for attempt in range(1, ATTEMPTS):
            answer = send()
            if answer.status_code not in AGAIN:
                return answer
            pause = 2.0**attempt
            with contextlib.suppress(ValueError):  # a date
                pause = float(answer.headers.get("retry-after", pause))
            time.sleep(min(PAUSE_S, pause))
        return send()


def _json(answer: httpx.Response) -> dict[str, Any]:
    if answer.status_code != 200:
        raise DataError(f"{answer.url}: {_message(answer)}")
    found: dict[str, Any] = answer.json()
    return found


def _message(answer: httpx.Response) -> str:
    try:
        return f"HTTP {answer.status_code}: {answer.json()['error']['message']}"
    except (ValueError, LookupError, TypeError):
        return f"HTTP {answer.status_code}"
