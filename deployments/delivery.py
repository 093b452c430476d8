"""From the engine's events to what each job is told."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from deployments.engine.request import Delta, Event, Finished, Request, Rows
from deployments.messages import End, Job, Message, Piece, Refusal, TokenLogprob

if TYPE_CHECKING:  # Serve's controller and proxies import this module, and need no torch
    from deployments.chat import ToolReader
    from deployments.engine.engine import Engine
    from deployments.runs import OpenRun
    from deployments.spelling import Spelling

logger = logging.getLogger("ray.serve")
CROWD = 8  # streams at once beyond which each gets its tokens two by two


@dataclass(eq=False)
class Choice:
    """One sequence of a job on its way, and what it has to say next.

    Attributes:
        index: Which of the job's choices it is.
        request: The engine's request.
        reader: Finds tool calls in its text.
        run: Takes what it records.
        held: Whether what came last was held back; at first, so that the first token goes out alone.
        text: Text to say next.
        calls: Tool calls to say next.
        scored: Tokens whose logprobs go with the next message.
    """

    index: int
    request: Request
    reader: ToolReader | None = None
    run: OpenRun | None = None
    held: bool = True
    text: str = ""
    calls: tuple[dict[str, Any], ...] = ()
    scored: list[TokenLogprob] = field(default_factory=list)

    def add(self, text: str) -> None:
        """Take more of the model's text."""
        content, calls = self.reader.add(text) if self.reader else (text, ())
        self.text += content
        self.calls += calls

    def close(self) -> None:
        """Take what the reader held back, at the end."""
        if self.reader:
            content, calls = self.reader.close()
            self.text += content
            self.calls += calls

    def take_piece(self) -> Piece | None:
        """What is to be said now; logprobs of tokens whose text is held back wait with it."""
        if not self.text and not self.calls:
            return None
        piece = Piece(self.index, self.text, self.calls, self.take_scored())
        self.text, self.calls = "", ()
        return piece

    def take_scored(self) -> tuple[TokenLogprob, ...]:
        """The tokens read since the last message."""
        taken, self.scored = tuple(self.scored), []
        return taken


@dataclass(eq=False)
class Ticket:
    """A job on its way.

    Attributes:
        job: The job.
        choices: Its choices by engine request id.
        streamed: Whether it is told of its text as it grows.
        messages: What it is told.
        open: Choices that have not said End.
        tasks: Choices that are ending.
    """

    job: Job
    choices: Mapping[str, Choice]
    streamed: bool
    messages: asyncio.Queue[Message] = field(default_factory=asyncio.Queue)
    open: int = 0
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def say(self, choice: Choice) -> None:
        """Say what a choice has to say now."""
        if piece := choice.take_piece():
            self.messages.put_nowait(piece)


class Delivery:
    """The jobs on their way. Everything here is called on one event loop.

    A message costs Serve about as much processor time as a token costs a small model. So where more than `CROWD`
    streams are open, their tokens come two by two, the first one alone.
    """

    def __init__(self, engine: Engine, spelling: Spelling) -> None:
        self._engine = engine
        self._spelling = spelling
        self._tickets: dict[str, Ticket] = {}  # engine request id -> its job
        self._streams = 0

    def __len__(self) -> int:
        return len(self._tickets)

    def open(self, job: Job, choices: Mapping[str, Choice], streamed: bool) -> Ticket:
        """Queue a job's requests; its ticket is told of them."""
        ticket = Ticket(job, choices, streamed, open=len(choices))
        self._streams += streamed
        self._tickets.update(dict.fromkeys(choices, ticket))
        for choice in choices.values():
            self._engine.submit(choice.request)
        return ticket

    def drop(self, ticket: Ticket) -> None:
        """Forget a job; what still runs of it is cancelled and frees its slot."""
        self._streams -= ticket.streamed
        for request_id, choice in ticket.choices.items():
            self._tickets.pop(request_id, None)
            if ticket.open:
                self._engine.cancel(request_id)
                if choice.run:
                    choice.run.drop()

    def deliver(self, events: list[Event]) -> None:
        """Pass on one step's events."""
        for event in events:
            ticket = self._tickets.get(event.id)
            if ticket is None:  # its client has gone
                if not isinstance(event, Delta):
                    self._written(event)
                continue
            try:
                self._deliver(ticket, ticket.choices[event.id], event)
            except Exception as error:  # noqa: BLE001 - a parser's; the other requests' events go on
                self._fail(ticket, error)

    def fail_all(self, message: str) -> None:
        """Tell every job that the engine has ended."""
        for ticket in self._tickets.values():
            ticket.messages.put_nowait(Refusal(message, None, "unavailable", 503))

    def _deliver(self, ticket: Ticket, choice: Choice, event: Event) -> None:
        if isinstance(event, Delta):
            self._add(choice, event)
            if self._streams <= CROWD or choice.held:
                ticket.say(choice)
                choice.held = False
            else:
                choice.held = True
        elif isinstance(event, Rows):
            assert choice.run is not None
            choice.run.add(event.captured, functools.partial(self._written, event))
        else:
            task = asyncio.ensure_future(self._end(ticket, choice, event))
            ticket.tasks.add(task)
            task.add_done_callback(functools.partial(self._ended, ticket))

    def _add(self, choice: Choice, delta: Delta) -> None:
        if delta.logprobs:
            choice.scored.extend(self._spelling.scored(delta))
        choice.add(delta.text)

    def _written(self, event: Rows | Finished) -> None:
        """Tell the engine that recorded rows need no memory any more."""
        if event.captured is not None:
            self._engine.written(event.id, event.captured.bytes)

    async def _end(self, ticket: Ticket, choice: Choice, event: Finished) -> None:
        """Say a choice's last words, once its activations are durable."""
        try:
            if event.reason != "error":
                if event.rest:
                    self._add(choice, event.rest)
                choice.close()
                ticket.say(choice)
            message = await self._last_message(ticket, choice, event)
        finally:
            self._written(event)
        _log(choice, event)
        ticket.messages.put_nowait(message)

    async def _last_message(self, ticket: Ticket, choice: Choice, event: Finished) -> Message:
        if event.reason == "error":
            return Refusal(event.error or "", None, event.code, 500)
        run = await choice.run.report(event) if choice.run else None
        if run and run.status == "failed" and ticket.job.capture and ticket.job.capture.required:
            return Refusal(f"the activations could not be stored: {run.reason}", "capture", "capture_failed", 500)
        calls = choice.reader and choice.reader.called and event.reason == "stop"
        reason = "tool_calls" if calls else event.reason
        return End(choice.index, reason, len(event.prompt), len(event.tokens), run, choice.take_scored())

    def _ended(self, ticket: Ticket, task: asyncio.Task[None]) -> None:
        ticket.tasks.discard(task)
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            self._fail(ticket, error)

    def _fail(self, ticket: Ticket, error: Exception) -> None:
        logger.error("request %s failed", ticket.job.id, exc_info=error)
        message = f"the server failed on request {ticket.job.id}; its log says why"
        ticket.messages.put_nowait(Refusal(message, None, "internal_error", 500))


def _log(choice: Choice, event: Finished) -> None:
    memory = event.memory
    logger.info(
        "request %s: %s, %d prompt and %d generated tokens; memory before %s, peak %s, after %s",
        choice.request.id,
        event.reason,
        len(event.prompt),
        len(event.tokens),
        *(f"{size / 2**20:.1f} MiB" for size in (memory.before, memory.peak, memory.after)),
    )
