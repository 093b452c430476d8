"""Sends examples to a server, many prompts per request."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Sequence
from typing import Any

from deployments.collect.examples import LOST, DataError, Example, Outcome, Settings, number
from deployments.messages import Refusal
from vitrine.connection.blocking import wait
from vitrine.connection.transport import Transport, api_root, pause_s
from vitrine.runs.fetching import COLLECTED, collected, listed
from vitrine.server_error import RequestFailed, ServerAway, ServerError

IN_FLIGHT = 128  # prompts
TIMEOUT_S = 3600.0  # of a request: the server's own limit comes first
MAX_OUTAGE_S = 60.0
ATTEMPTS = 6  # of a request whose answer is lost
NAME = re.compile("run-[0-9a-f]{24}")  # as `Settings.name` makes it


def connect(base_url: str) -> Transport:
    """A client of a server, whose key is `OPENAI_API_KEY`.

    Raises:
        DataError: The URL or the key is invalid.
    """
    key = os.environ.get("OPENAI_API_KEY")
    try:
        return Transport(api_root(base_url), key, TIMEOUT_S, max_outage=MAX_OUTAGE_S, parallel=IN_FLIGHT)
    except ValueError as error:
        raise DataError(f"--base-url: {error}") from error


def first_model(server: Transport) -> str:
    """The id of the first model that a server lists.

    Raises:
        DataError: It lists none.
        RequestFailed: It cannot be reached.
    """
    models = wait(server.get("/models", repeat=False))["data"]
    if not models:
        raise DataError(f"--base-url {server.url}: the server serves no model: load one")
    return str(models[0]["id"])


class Sender:
    """Sends examples to one server.

    Attributes:
        in_flight: The most examples to run at once.
    """

    in_flight = IN_FLIGHT

    def __init__(self, server: Transport, settings: Settings) -> None:
        self._server = server
        self._settings = settings
        self._stored: set[int] | None = None

    async def stored(self, names: Sequence[str]) -> set[str]:
        """Those of some examples' names that earlier commands have stored in the session."""
        if self._stored is None:
            runs = listed(self._server, {"session": self._settings.session})
            tags = (run["tags"].get(COLLECTED, "") async for run in runs)
            self._stored = {number(name) async for name in tags if NAME.fullmatch(name)}
        return {name for name in names if number(name) in self._stored}

    async def send(
        self, examples: list[Example], outcome: Outcome, again: bool = False
    ) -> tuple[list[Example], Refusal]:
        """Run the examples of one request, and count their runs, which are durable then.

        If an answer is lost, those that are not stored nevertheless are sent again, unless they come `again`.

        Returns:
            The examples of which there is no run, and the reason.

        Raises:
            RequestFailed: The server cannot be reached any more.
        """
        route = "/completions" if isinstance(examples[0].prompt, str) else "/chat/completions"
        refusal = Refusal("the server gave no answer")
        for attempt in range(ATTEMPTS if again else 1, ATTEMPTS + 1):
            try:
                answer = await self._server.post(route, self._body(examples), repeat=False)
            except RequestFailed as error:
                if isinstance(error, ServerError) and error.status < 500:
                    return examples, Refusal(error.message, error.param, status=error.status)
                if attempt == ATTEMPTS and isinstance(error, ServerAway):
                    raise
                await asyncio.sleep(pause_s(attempt + 1))
                names = [self._settings.name(example) for example in examples]
                stored = await collected(self._server, self._settings.session, names)
                left = [example for example, name in zip(examples, names, strict=True) if name not in stored]
                outcome.already_stored += len(examples) - len(left)
                examples, refusal = left, Refusal(str(error), code=LOST)
                if not examples:
                    break
            else:
                for run in answer["activations_meta"]["runs"]:
                    outcome.add(examples[run["index"]].place, run["status"], run.get("tokens", 0), run.get("reason"))
                return [], refusal
        return examples, refusal

    def _body(self, examples: list[Example]) -> dict[str, Any]:
        settings = self._settings
        capture = settings.capture(examples).model_dump(mode="json", by_alias=True, exclude_unset=True)
        capture["tags"] = [example.tags | {COLLECTED: settings.name(example)} for example in examples]
        prompts = [example.prompt for example in examples]
        asked = {"prompt": prompts} if isinstance(prompts[0], str) else {"messages": prompts[0]}
        fields = {"model": settings.model, "max_tokens": settings.max_tokens, "temperature": 0}
        return fields | asked | {"session_id": settings.session, "capture": capture}
