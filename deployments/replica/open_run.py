"""One run during recording: sends rows to the store as they arrive, and reports the result at the end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from ray.exceptions import RayActorError, RayError

from deployments.activations.facts import RunLocation, StoreError
from deployments.chat.token_texts import TextOffsets
from deployments.engine.capture.buffer import joined
from deployments.engine.capture.row_sizes import RowSizes
from deployments.engine.request import Captured, Finished, Request
from deployments.errors import RequestError
from deployments.job import Job
from deployments.messages import RunReport
from deployments.points.capture import Capture
from deployments.points.names import dtype_name
from deployments.points.placement import Layout
from deployments.points.token_choices import ASSISTANT, REASONING, Tokens, resolve

logger = logging.getLogger("ray.serve")


class RunSender(Protocol):
    """The replica's interface to the store."""

    async def append(self, run: RunWriter, captured: Captured, part: int) -> None:
        """Send rows of an unfinished run."""

    async def write(self, run: RunWriter, event: Finished, parts: int) -> RunLocation:
        """Send the last rows; they are durable when this returns."""

    def abandon(self, run: RunWriter) -> None:
        """Discard the rows sent for a run."""


class RunWriter:
    """The run of one choice during recording. Rows are stored in the order in which the engine releases them.

    Args:
        runs: The replica's interface to the store.
        index: The choice's index in the job, prompt by prompt.
        offsets: The start of each token in the text so far.
        layout: Shows the prompt's messages, and how to follow the reasoning of the answer.

    Attributes:
        id: The run's id.
        job: The job of the choice.
        number: The choice's index among those of its prompt.
        asked: The chat's messages, or a list of the completion's prompt alone.
        request: The engine's request of the choice, with a `capture`.
        sample_id: The client's id of the sample.
        tags: The client's tags.
        created: Arrival of the job in Unix seconds, plus the index in microseconds, so that runs are listed in the
            order of requests and choices, whichever finishes first.
        most: The most bytes that it can record.
    """

    def __init__(
        self, runs: RunSender, job: Job, request: Request, index: int, offsets: TextOffsets, layout: Layout
    ) -> None:
        self.id = job.run_id(index)
        self.job = job
        self.number = index % job.n
        self.asked = [job.prompts[index // job.n]] if job.messages is None else job.messages
        self.request = request
        self.created = job.created + index * 1e-6
        assert request.capture is not None
        self.sample_id, self.tags = request.capture.labels_of(index // job.n)
        self.most = RowSizes.bytes(request.capture, request.points).of(recordable(request))
        self._runs = runs
        self._offsets = offsets
        self._turns = layout.turns
        self._reasoning = layout.follow() if layout.turns else None
        self._pieces: list[Captured] = []  # for an inline answer
        self._sending: asyncio.Task[None] | None = None
        self._parts = 0
        self._failed: str | None = None

    def add(self, captured: Captured, done: Callable[[], None]) -> None:
        """Take rows that the engine releases before the request's end.

        Args:
            captured: The rows.
            done: Called when they no longer need memory here, even if they were not stored.
        """
        assert self.job.capture is not None
        if self.job.capture.destination == "inline":  # small: bounded by the limit on numbers
            self._pieces.append(captured)
            done()
            return
        self._sending = asyncio.ensure_future(self._send(self._sending, captured, done))

    async def _send(self, before: asyncio.Task[None] | None, captured: Captured, done: Callable[[], None]) -> None:
        try:
            if before is not None:
                await before
            if self._failed is None:
                await self._runs.append(self, captured, self._parts)
                self._parts += 1
        except Exception as error:  # noqa: BLE001 - the answer is sent, with the error in `activations_meta`
            self._fail(error)
        finally:
            done()

    def _fail(self, error: Exception) -> None:
        # The answer is useful without its activations; it contains the error.
        self._failed = str(getattr(error, "cause", None) or error)
        if isinstance(error, RayActorError):
            self._failed = "the activation store did not answer: send the request again"
        logger.warning("run %s was not stored: %s", self.id, self._failed)

    async def report(self, event: Finished) -> RunReport:
        """Store the last rows and report where the run is stored; it is durable when this returns."""
        assert self.job.capture is not None
        if self._sending is not None:
            await self._sending
        report = await self._settle(event)
        if report.status == "failed":
            self.drop()
        return report

    async def _settle(self, event: Finished) -> RunReport:
        assert self.job.capture is not None
        tokens = len(event.prompt) + len(event.tokens)
        report = RunReport(self.id, self.job.session_id, "failed", tokens, len(event.prompt))
        if self._failed is not None:
            return replace(report, reason=self._failed)
        if event.captured is None or event.error:
            return replace(report, reason=event.error or "nothing was recorded")
        if not event.captured.positions and not self._parts and not self._pieces:
            return replace(report, reason="no token was generated, and capture.tokens chooses only generated tokens")
        if self.job.capture.destination == "inline":
            captured = joined([*self._pieces, event.captured])
            return replace(report, status="inline", points=_inline(self.job.capture, captured))
        try:
            stored = await self._runs.write(self, event, self._parts)
        except (StoreError, RayError, ValueError) as error:
            self._fail(error)
            return replace(report, reason=self._failed)
        named = self.job.capture.destination == "reference"
        points = {name: point._asdict() for name, point in stored.points.items()} if named else {}
        return replace(report, status="stored", points=points)

    def columns(self, captured: Captured) -> dict[str, Sequence[int]]:
        """The columns of recorded rows, which follow those of earlier calls, beside the tokens; see `to_batch`."""
        prompt, known = len(self.request.prompt), len(self._offsets.ends) - 1
        self._offsets.add(captured.seen)
        columns: dict[str, Sequence[int]] = {"text_offsets": [self._offsets.ends[at] for at in captured.positions]}
        if self._turns is None or (turns := self._turns()) is None:
            return columns
        if self._reasoning is not None:
            for token in captured.seen[max(0, prompt - known) :]:
                self._reasoning.add(token)
        roles, of = list[int](), list[int]()
        for at in captured.positions:
            is_reasoning = self._reasoning is not None and self._reasoning.has(True, at)
            roles.append(turns.roles[at] if at < prompt else REASONING if is_reasoning else ASSISTANT)
            of.append(turns.turns[at] if at < prompt else len(turns.speakers) - 1)
        return columns | {"roles": roles, "turns": of}

    def text(self, event: Finished) -> str:
        """The text of prompt and answer, including special tokens."""
        tokens, known = (*event.prompt, *event.tokens), len(self._offsets.ends) - 1
        self._offsets.add(tokens[known:])
        return self._offsets.close()

    def drop(self) -> None:
        """Discard the run: its client has disconnected, or it failed."""
        if self._sending is not None:
            self._failed = self._failed or "the request was cancelled"
            self._runs.abandon(self)


def chosen_tokens(request: Request) -> Tokens:
    """The tokens that a request captures."""
    assert request.capture is not None
    return resolve(request.capture.tokens, len(request.prompt), "capture.tokens")


def recordable(request: Request) -> Sequence[int]:
    """Positions of the tokens that one choice may record at most.

    Raises:
        RequestError: It has no such token; names the field.
    """
    tokens, most = chosen_tokens(request), len(request.prompt) + request.max_tokens
    if (tokens.few or tokens.first) and tokens.stop is not None and tokens.stop > most:
        raise RequestError(f"prompt and answer have positions 0 to {most - 1}", "capture.tokens")
    return tokens.of(most)


def _inline(capture: Capture, captured: Captured) -> dict[str, dict[str, Any]]:
    features = capture.features
    info = "all_features" if features is None else f"first_{features.first}_features"
    if features and features.index:
        info = f"{len(features.index)}_listed_features"
    return {
        name: {
            "format": "sampled_tensor",
            "shape": list(value.shape),
            "dtype": dtype_name(value.dtype),
            "data": [_numbers(row) for row in value],
            "sample_info": info,
        }
        for name, value in captured.values.items()
    }


def _numbers(row: torch.Tensor) -> list[Any]:
    """A row's values; None if one is not finite, which JSON cannot express."""
    wide = row.float().numpy()
    values = wide.astype(object)
    values[~np.isfinite(wide)] = None
    return list(values.tolist())
