"""What a collection records of which examples, in which requests, and their outcomes."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from pydantic import BaseModel, ConfigDict, Field

from deployments.collect.examples import Example, together
from deployments.points.capture import Capture
from deployments.points.token_choices import parse

BLOCK = 512  # examples that are grouped into requests together


class Settings(BaseModel):
    """The settings of a collection.

    Attributes:
        model: The model's id.
        loaded: Options of loading that change the model's results.
        session: The session of the runs.
        points: Names of points, with wildcards.
        tokens: The tokens to record, as `capture.tokens`.
        max_tokens: Tokens to generate after each prompt, greedily.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    loaded: str = ""
    session: str
    points: tuple[str, ...]
    tokens: str = "last"
    max_tokens: int = Field(default=0, ge=0)

    def capture(self, examples: list[Example]) -> Capture:
        """The capture of a request with these examples."""
        return Capture.model_validate(
            {
                "points": list(self.points),
                "tokens": parse(self.tokens),
                "mode": "generate" if self.max_tokens else "trace",
                "return": "id",
                "store_text": True,
                "tags": [example.tags for example in examples],
                "sample_id": [example.id for example in examples],
            }
        )

    def name(self, example: Example) -> str:
        """The example's name; the same for the same example and settings, so that it is stored once."""
        text = json.dumps([self.model_dump(mode="json"), example.id, example.prompt, example.tags], sort_keys=True)
        return f"run-{hashlib.sha256(text.encode()).hexdigest()[:24]}"


@dataclass
class Outcome:
    """The outcome of some examples.

    Attributes:
        runs: The number of stored runs.
        tokens: Tokens of these runs, including generated ones.
        already_stored: The number of examples that were stored before or repeated.
        failures: The place of each other example, and the reason.
        refusal: Why no example can be stored: an error of the arguments, the engine or the server.
        began: When the first example was sent to the model, in Unix seconds.
        ended: When the last run was durable.
    """

    runs: int = 0
    tokens: int = 0
    already_stored: int = 0
    failures: list[str] = field(default_factory=list)
    refusal: str | None = None
    began: float = 0.0
    ended: float = 0.0

    @property
    def seconds(self) -> float:
        """From the first example to the last durable run."""
        return self.ended - self.began

    @property
    def tokens_per_second(self) -> float:
        """The rate of the runs' tokens."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    def __iadd__(self, other: Outcome) -> Outcome:
        """Add the figures of other examples, without the texts of their failures."""
        self.runs += other.runs
        self.tokens += other.tokens
        self.already_stored += other.already_stored
        self.began = min(self.began or other.began, other.began or self.began)
        self.ended = max(self.ended, other.ended)
        return self

    def add(self, place: str, status: str, tokens: int, reason: str | None) -> None:
        """Count the run of the example at `place`, which is `stored` or failed for a reason."""
        if status == "stored":
            self.runs += 1
            self.tokens += tokens
        else:
            self.failures.append(f"{place}: {reason}")

    def refuse(self, place: str, message: str, field: str | None, status: int) -> None:
        """Count the rejected example at `place`, by the request's wrong field and the HTTP status."""
        if (field or "").startswith("capture.points"):
            self.refusal = f"--points: {message}"
        elif field == "model":
            self.refusal = f"--model: {message}"
        elif status not in (400, 413, 422):  # not an error of the example
            self.refusal = f"{place}: {message}"
        else:
            self.failures.append(f"{place}: {message}")


class Runner(Protocol):
    """Runs examples: engines of this cluster, or a server.

    Attributes:
        in_flight: The most examples to run at once.
    """

    in_flight: int

    async def stored(self, names: Sequence[str]) -> set[str]:
        """Those of some examples' names that earlier commands have stored in the session."""

    async def run(self, examples: list[Example]) -> Outcome:
        """Store the runs of one request's examples; they are durable when this returns."""


def number(name: str) -> int:
    """64 bits of an example's name; the chance that two of a million are equal is one in 36 million."""
    return int(name.removeprefix("run-")[:16], 16)


async def outcomes(items: Iterator[Example | str], settings: Settings, runner: Runner) -> AsyncGenerator[Outcome]:
    """The outcomes of each request's examples, in the order in which they end."""
    running: dict[asyncio.Task[Outcome], int] = {}
    seen = set[int]()
    try:
        while block := list(islice(items, BLOCK)):
            named = {settings.name(item): item for item in block if isinstance(item, Example)}
            new = {name: item for name, item in named.items() if number(name) not in seen}
            seen.update(map(number, new))
            for name in await runner.stored(list(new)):
                del new[name]
            invalid = [item for item in block if isinstance(item, str)]
            if known := len(block) - len(invalid) - len(new):
                yield Outcome(already_stored=known)
            if invalid:
                yield Outcome(failures=invalid)
            for request in together(new.values()):
                running[asyncio.create_task(runner.run(request))] = len(request)
                while sum(running.values()) >= runner.in_flight:
                    for task in (await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED))[0]:
                        del running[task]
                        yield task.result()
        for task in list(running):
            yield await task
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
