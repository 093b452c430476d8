"""From the engine's events to what each job is told."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from deployments.engine.request import GRAMMAR_TOO_COMPLEX, Delta, Event, Finished, PromptLogprobs, Request, Rows
from deployments.messages import (
    CallPart,
    ChangedNorm,
    End,
    Job,
    Message,
    Piece,
    ReadoutValues,
    Refusal,
    TokenLayers,
    TokenLogprob,
)
from deployments.replica.readout_messages import edit_reports, values_of

if TYPE_CHECKING:  # Serve's controller and proxies import this module, and need no torch
    from deployments.chat.prompts import Echo
    from deployments.chat.reader import AnswerParts, AnswerReader
    from deployments.chat.token_texts import TokenTexts
    from deployments.engine.edits import Edit
    from deployments.engine.engine import Engine
    from deployments.replica.runs import OpenRun

logger = logging.getLogger("ray.serve")

SLICE = 1024  # characters of a whole answer that are read at a time, which takes 10 ms at most


@dataclass(eq=False)
class RunningChoice:
    """One sequence of a job on its way, and what it has to say next.

    Attributes:
        index: Which of the job's choices it is.
        request: The engine's request.
        reader: Finds thoughts and tool calls in its text.
        run: Takes what it records.
        echo: The prompt that its text begins with.
        text: Text to say next.
        reasoning: Thoughts to say next.
        calls: Parts of tool calls to say next.
        scored: Tokens whose logprobs go with the next message.
        lens: Tokens whose layers go with it, where they are asked for.
        token_ids: Token ids that go with the next message.
        prompt_ids: Those of the prompt, which go with the first.
        readouts: Rows of readouts that go with the next message.
        logprob: Of all its tokens together.
        ended: The engine has ended it.
    """

    index: int
    request: Request
    reader: AnswerReader | None = None
    run: OpenRun | None = None
    echo: Echo | None = None
    text: str = ""
    reasoning: str = ""
    calls: tuple[CallPart, ...] = ()
    scored: list[TokenLogprob] = field(default_factory=list)
    lens: list[TokenLayers] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    prompt_ids: tuple[int, ...] = ()
    readouts: list[ReadoutValues] = field(default_factory=list)
    logprob: float = 0.0
    ended: bool = False

    def add(self, text: str) -> None:
        """Take more of the model's text."""
        if self.reader:
            self._take(self.reader.add(text))
        else:
            self.text += text

    def close(self) -> None:
        """Take what the reader held back, at the end."""
        if self.reader:
            self._take(self.reader.close())

    def _take(self, written: AnswerParts) -> None:
        self.text += written.content
        self.reasoning += written.reasoning
        self.calls += written.tool_calls

    def take_piece(self) -> Piece | None:
        """What is to be said now; logprobs and layers of tokens whose text is held back wait with it."""
        if not (self.text or self.reasoning or self.calls):
            return None
        piece = Piece(self.index, self.text, self.calls, reasoning=self.reasoning, **self.take_tokens())
        self.text, self.reasoning, self.calls = "", "", ()
        return piece

    def take_tokens(self) -> dict[str, Any]:
        """What a message says of the tokens read since the last, by its fields."""
        taken = {
            "logprobs": tuple(self.scored),
            "token_ids": tuple(self.token_ids),
            "prompt_ids": self.prompt_ids,
            "lens": tuple(self.lens) if self.request.lens else None,
            "readouts": tuple(self.readouts),
        }
        self.readouts = []
        self.scored, self.token_ids, self.prompt_ids, self.lens = [], [], (), []
        return taken


@dataclass(eq=False)
class Ticket:
    """A job on its way.

    Attributes:
        job: The job.
        choices: Its choices by engine request id.
        messages: What it is told.
        open: Choices that have not said End.
        tasks: Choices that are ending.
    """

    job: Job
    choices: Mapping[str, RunningChoice]
    messages: asyncio.Queue[Message] = field(default_factory=asyncio.Queue)
    open: int = 0
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def say(self, choice: RunningChoice) -> None:
        """Say what a choice has to say now."""
        if piece := choice.take_piece():
            self.messages.put_nowait(piece)


class Delivery:
    """The jobs on their way. Everything here is called on one event loop."""

    def __init__(self, engine: Engine, token_texts: TokenTexts) -> None:
        self._engine = engine
        self._token_texts = token_texts
        self._tickets: dict[str, Ticket] = {}  # engine request id -> its job
        self._dropped: dict[str, Ticket] = {}  # the same, until the engine has ended it

    def __len__(self) -> int:
        return len(self._tickets)

    def open(self, job: Job, choices: Mapping[str, RunningChoice]) -> Ticket:
        """Queue a job's requests; its ticket is told of them."""
        ticket = Ticket(job, choices, open=len(choices))
        self._tickets.update(dict.fromkeys(choices, ticket))
        for choice in choices.values():
            self._engine.submit(choice.request)
        return ticket

    def drop(self, ticket: Ticket) -> None:
        """Forget a job; what still runs of it is cancelled and frees its slot."""
        for request_id, choice in ticket.choices.items():
            if self._tickets.pop(request_id, None) and not choice.ended:
                self._dropped[request_id] = ticket
            if ticket.open:
                self._engine.cancel(request_id)
                if choice.run:
                    choice.run.drop()

    def deliver(self, events: list[Event]) -> None:
        """Pass on one step's events."""
        for event in events:
            if event.id in self._dropped:
                self._let_go(event)
                continue
            ticket = self._tickets[event.id]
            try:
                self._deliver(ticket, ticket.choices[event.id], event)
            except Exception as error:  # noqa: BLE001 - a parser's; the other requests' events go on
                self._fail(ticket, error)

    def _let_go(self, event: Event) -> None:
        """Take what the engine says of a request whose client has gone, or has been told that it is late."""
        if isinstance(event, Rows | Finished):
            self._written(event)
        if isinstance(event, Finished):
            ticket = self._dropped.pop(event.id)
            _log(ticket.job, ticket.choices[event.id], event)

    def fail_all(self, message: str) -> None:
        """Tell every job that the engine has ended."""
        for ticket in self._tickets.values():
            ticket.messages.put_nowait(Refusal(message, None, "unavailable", 503))

    def _deliver(self, ticket: Ticket, choice: RunningChoice, event: Event) -> None:
        if isinstance(event, Delta):
            self._add(ticket.job, choice, event)
            choice.add(event.text)  # at most a token's, tens of microseconds: not worth a thread
            ticket.say(choice)
        elif isinstance(event, PromptLogprobs):
            assert choice.echo is not None
            prompt, offsets = choice.request.prompt, choice.echo.offsets
            choice.scored.extend(self._token_texts.of_prompt(prompt, event.logprobs, offsets))
        elif isinstance(event, Rows):
            assert choice.run is not None
            choice.run.add(event.captured, functools.partial(self._written, event))
        else:
            choice.ended = True
            task = asyncio.ensure_future(self._end(ticket, choice, event))
            ticket.tasks.add(task)
            task.add_done_callback(functools.partial(self._ended, ticket))

    def _add(self, job: Job, choice: RunningChoice, delta: Delta) -> None:
        if job.logprobs is not None:
            before = len(choice.echo.text) if choice.echo else 0
            choice.scored.extend(self._token_texts.scored(delta.tokens, delta.logprobs, before))
        if (lens := choice.request.lens) and lens.generated:
            choice.lens.extend(self._token_texts.seen(delta.tokens, lens, delta.lens))
        if job.token_ids:
            choice.token_ids.extend(delta.tokens)
        choice.readouts += values_of(choice.request, delta.readouts)
        choice.logprob += sum(one.logprob for one in delta.logprobs)

    def _written(self, event: Rows | Finished) -> None:
        """Tell the engine that recorded rows need no memory any more."""
        if event.captured is not None:
            self._engine.written(event.id, event.captured.bytes)

    async def _end(self, ticket: Ticket, choice: RunningChoice, event: Finished) -> None:
        """Say a choice's last words, once its activations are durable."""
        try:
            if event.reason != "error":
                if event.rest:
                    self._add(ticket.job, choice, event.rest)
                    for at in range(0, len(event.rest.text), SLICE):
                        choice.add(event.rest.text[at : at + SLICE])
                        await asyncio.sleep(0)  # the other requests' events
                choice.readouts += values_of(choice.request, event.readouts)
                choice.close()
                ticket.say(choice)
            message = await self._last_message(ticket, choice, event)
        finally:
            self._written(event)
        _log(ticket.job, choice, event)
        ticket.messages.put_nowait(message)

    async def _last_message(self, ticket: Ticket, choice: RunningChoice, event: Finished) -> Message:
        if event.code == GRAMMAR_TOO_COMPLEX:
            return Refusal(event.error or "", "tools" if ticket.job.must_call else "response_format", event.code)
        if event.reason == "error":
            return Refusal(event.error or "", None, event.code, 500)
        run = await choice.run.report(event) if choice.run else None
        if run and run.status == "failed" and ticket.job.capture and ticket.job.capture.required:
            return Refusal(f"the activations could not be stored: {run.reason}", "capture", "capture_failed", 500)
        calls = choice.reader and choice.reader.called and event.reason == "stop"
        reason = "tool_calls" if calls else event.reason
        tokens = len(event.tokens)
        likeliness = choice.logprob / max(1, tokens)
        more = {
            "norms": tuple(_norms(choice.request.edits)),
            "prompt_lens": self._prompt_lens(choice, event),
            "cached_tokens": event.cached,
        }
        said = choice.take_tokens() | more
        said |= {"edits": tuple(edit_reports(choice.request.edits)), "stop_reason": event.stop_reason}
        return End(choice.index, reason, len(event.prompt), tokens, run, **said, likeliness=likeliness)

    def _prompt_lens(self, choice: RunningChoice, event: Finished) -> tuple[TokenLayers, ...]:
        if choice.request.lens is None:
            return ()
        positions = [position for position, _ in event.prompt_lens]
        tokens = [event.prompt[position] for position in positions]
        seen = self._token_texts.seen(tokens, choice.request.lens, [layers for _, layers in event.prompt_lens])
        return tuple(one._replace(position=position) for position, one in zip(positions, seen, strict=True))

    def _ended(self, ticket: Ticket, task: asyncio.Task[None]) -> None:
        ticket.tasks.discard(task)
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            self._fail(ticket, error)

    def _fail(self, ticket: Ticket, error: Exception) -> None:
        logger.error("request %s (%s) failed", ticket.job.id, ticket.job.request_id, exc_info=error)
        message = f"the server failed on request {ticket.job.request_id or ticket.job.id}; its log says why"
        ticket.messages.put_nowait(Refusal(message, None, "internal_error", 500))


def _norms(edits: Sequence[Edit]) -> Iterator[ChangedNorm]:
    for edit in edits:
        if edit.norms and (median := edit.norms.median) is not None:
            yield ChangedNorm(edit.norms.field, edit.point.name, median)


def _log(job: Job, choice: RunningChoice, event: Finished) -> None:
    memory = event.memory
    logger.info(
        "request %s (%s): %s, %d prompt and %d generated tokens; memory before %s, peak %s, after %s",
        choice.request.id,
        job.request_id,  # Serve adds it to its own lines; here the engine's thread began, which knows none
        event.reason,
        len(event.prompt),
        len(event.tokens),
        *(f"{size / 2**20:.1f} MiB" for size in (memory.before, memory.peak, memory.after)),
    )
