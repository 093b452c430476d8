"""Running jobs: converts the engine's events into the messages of each choice."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deployments.engine.request import GRAMMAR_TOO_COMPLEX, Delta, Event, Finished, PromptLogprobs, Request, Rows
from deployments.job import Job
from deployments.messages import ChangedNorm, EditReport, End, Entry, Message, Piece, Refusal

if TYPE_CHECKING:  # Serve's controller and proxies import this module, and need no torch
    from deployments.chat.prompts import Echo
    from deployments.chat.reader import AnswerParts, AnswerReader
    from deployments.chat.token_texts import TokenTexts
    from deployments.engine.edits import Edit
    from deployments.engine.engine import Engine
    from deployments.replica.monitoring import MonitorLog
    from deployments.replica.open_run import RunWriter

logger = logging.getLogger("ray.serve")

Charge = Callable[[str | None, int, int], None]  # the owner, and numbers of tokens of prompts and of answers
SLICE = 1024  # characters of a whole answer that are parsed at a time, which takes at most 10 ms


@dataclass(eq=False)
class RunningChoice:
    """One running sequence of a job, and its next message.

    Attributes:
        request: The engine's request.
        piece: Its next message.
        reader: Finds reasoning and tool calls in its text.
        run: Receives its recorded rows.
        echo: The prompt at the start of its text.
        tokens: The number of its tokens so far.
        logprob: The sum over all its tokens.
        ended: The engine has ended it.
        generated: The number of its tokens, once the engine has ended it.
    """

    request: Request
    piece: Piece
    reader: AnswerReader | None = None
    run: RunWriter | None = None
    echo: Echo | None = None
    tokens: int = 0
    logprob: float = 0.0
    ended: bool = False
    generated: int = 0

    def add(self, text: str) -> None:
        """Append the model's next text."""
        if self.reader:
            self._take(self.reader.add(text))
        else:
            self.piece.text += text

    def close(self) -> None:
        """Append the text that the reader held back, at the end."""
        if self.reader:
            self._take(self.reader.close())

    def _take(self, written: AnswerParts) -> None:
        self.piece.text += written.content
        self.piece.reasoning += written.reasoning
        self.piece.tool_calls += written.tool_calls

    def take(self) -> Piece:
        """The next message, and begin another."""
        taken, self.piece = self.piece, Piece(self.piece.index, lens=None if self.piece.lens is None else [])
        return taken


@dataclass(eq=False)
class Ticket:
    """A running job.

    Attributes:
        job: The job.
        choices: Its choices by engine request id.
        messages: The queue of its messages.
        open: Choices that have not sent `End`.
        tasks: Choices that are ending.
    """

    job: Job
    choices: Mapping[str, RunningChoice]
    messages: asyncio.Queue[Message] = field(default_factory=asyncio.Queue)
    open: int = 0
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def say(self, choice: RunningChoice) -> None:
        """Send a choice's next message if it has text; logprobs and lens of tokens whose text is held back wait."""
        if choice.piece.text or choice.piece.reasoning or choice.piece.tool_calls:
            self.messages.put_nowait(choice.take())


class Delivery:
    """All running jobs. Call it on one event loop only."""

    def __init__(
        self,
        engine: Engine,
        token_texts: TokenTexts,
        monitor_log: MonitorLog | None = None,
        charge: Charge = lambda *_: None,
    ) -> None:
        """`charge` is called with the tokens of jobs that are dropped: the ingress counts those of the others."""
        self._engine = engine
        self._charge = charge
        self._monitor_log = monitor_log
        self._token_texts = token_texts
        self._tickets: dict[str, Ticket] = {}  # engine request id -> its job
        self._dropped: dict[str, Ticket] = {}  # the same for dropped requests, until the engine ends them

    def __len__(self) -> int:
        return len(self._tickets)

    def held_of(self, owner: str | None) -> int:
        """The number of an owner's sequences."""
        return sum(ticket.job.account.owner == owner for ticket in self._tickets.values())

    def open(self, job: Job, choices: Mapping[str, RunningChoice]) -> Ticket:
        """Queue a job's requests; their messages go to its ticket."""
        ticket = Ticket(job, choices, open=len(choices))
        self._tickets.update(dict.fromkeys(choices, ticket))
        for choice in choices.values():
            self._engine.submit(choice.request)
        return ticket

    def drop(self, ticket: Ticket) -> None:
        """Drop a job and cancel its running requests, which frees their pages.

        If it has not ended, charge the prompts that have begun, and the tokens so far of choices that have ended; the
        engine counts those of the others.
        """
        if ticket.open:
            begun = [one for name, one in ticket.choices.items() if self._engine.has_begun(name)]
            prompts = {one.piece.index // ticket.job.n: len(one.request.prompt) for one in begun}
            self._charge(ticket.job.account.owner, sum(prompts.values()), sum(one.generated for one in begun))
        for request_id, choice in ticket.choices.items():
            if self._tickets.pop(request_id, None) and not choice.ended:
                self._dropped[request_id] = ticket
            if ticket.open:
                self._engine.cancel(request_id)
                if choice.run:
                    choice.run.drop()

    def deliver(self, events: list[Event]) -> None:
        """Convert one step's events."""
        for event in events:
            if event.id in self._dropped:
                self._let_go(event)
                continue
            ticket = self._tickets[event.id]
            try:
                self._deliver(ticket, ticket.choices[event.id], event)
            except Exception as error:  # noqa: BLE001 - fails this request alone; the others' events are delivered
                self._fail(ticket, error)

    def _let_go(self, event: Event) -> None:
        """Handle an event of a request whose client has disconnected or got a timeout."""
        if isinstance(event, Rows | Finished):
            self._written(event)
        if isinstance(event, Finished):
            ticket = self._dropped.pop(event.id)
            self._charge(ticket.job.account.owner, 0, len(event.tokens))
            self._log(ticket.job, ticket.choices[event.id], event)

    def fail_all(self, message: str) -> None:
        """Send an error to every job: the engine has ended."""
        for ticket in self._tickets.values():
            ticket.messages.put_nowait(Refusal(message, None, "unavailable", 503))

    def _deliver(self, ticket: Ticket, choice: RunningChoice, event: Event) -> None:
        if isinstance(event, Delta):
            self._add(ticket.job, choice, event)
            choice.add(event.text)  # at most one token's text: takes microseconds, so no thread
            ticket.say(choice)
        elif isinstance(event, PromptLogprobs):
            assert choice.echo is not None
            prompt, offsets = choice.request.prompt, choice.echo.offsets
            choice.piece.logprobs += self._token_texts.of_prompt(prompt, event.logprobs, offsets)
        elif isinstance(event, Rows):
            assert choice.run is not None
            choice.run.add(event.captured, functools.partial(self._written, event))
        else:
            choice.ended, choice.generated = True, len(event.tokens)
            task = asyncio.ensure_future(self._end(ticket, choice, event))
            ticket.tasks.add(task)
            task.add_done_callback(functools.partial(self._ended, ticket))

    def _add(self, job: Job, choice: RunningChoice, delta: Delta) -> None:
        piece = choice.piece
        if job.logprobs is not None:
            before = len(choice.echo.text) if choice.echo else 0
            piece.logprobs += self._token_texts.scored(delta.tokens, delta.logprobs, before)
        if piece.lens is not None and (lens := choice.request.lens) and lens.generated:
            entries = self._token_texts.lens(delta.tokens, lens, delta.lens)
            if lens.part:
                at = enumerate(entries, len(choice.request.prompt) + choice.tokens)
                entries = [{"position": position} | entry for position, entry in at if lens.part(position)]
            piece.lens += entries
        if job.token_ids:
            piece.token_ids += delta.tokens
        piece.readouts += delta.readouts
        choice.tokens += len(delta.tokens)
        choice.logprob += sum(one.logprob for one in delta.logprobs)

    def _written(self, event: Rows | Finished) -> None:
        """Report to the engine that recorded rows no longer need memory."""
        if event.captured is not None:
            self._engine.written(event.id, event.captured.bytes)

    async def _end(self, ticket: Ticket, choice: RunningChoice, event: Finished) -> None:
        """Send a choice's last messages after its activations are durable."""
        try:
            if event.reason != "error":
                if event.rest:
                    self._add(ticket.job, choice, event.rest)
                    for at in range(0, len(event.rest.text), SLICE):
                        choice.add(event.rest.text[at : at + SLICE])
                        await asyncio.sleep(0)  # for the events of other requests
                choice.piece.readouts += event.readouts
                choice.close()
                if choice.request.streamed:  # its text does not wait for its activations
                    ticket.say(choice)
            message = await self._last_message(ticket, choice, event)
        finally:
            self._written(event)
        self._log(ticket.job, choice, event)
        ticket.messages.put_nowait(message)

    async def _last_message(self, ticket: Ticket, choice: RunningChoice, event: Finished) -> Message:
        if event.code == GRAMMAR_TOO_COMPLEX:
            field = "tools" if ticket.job.must_call else "response_format"
            return Refusal(event.error or "", ticket.job.fields.get(field, field), event.code)
        if event.reason == "error":
            return Refusal(event.error or "", None, event.code, 500)
        run = await choice.run.report(event) if choice.run else None
        if run and run.status == "failed" and ticket.job.capture and ticket.job.capture.required:
            return Refusal(f"the activations could not be stored: {run.reason}", "capture", "capture_failed", 503)
        calls = choice.reader and choice.reader.called and event.reason == "stop"
        reason = "tool_calls" if calls else event.reason
        tokens = len(event.tokens)
        return End(
            choice.take(),
            reason,
            len(event.prompt),
            tokens,
            run,
            prompt_lens=self._prompt_lens(choice, event),
            norms=tuple(_norms(choice.request.edits)),
            likeliness=choice.logprob / max(1, tokens),
            edits=tuple(_edit_reports(choice.request.edits)),
            stop_reason=event.stop_reason,
            cached_tokens=event.cached,
        )

    def _prompt_lens(self, choice: RunningChoice, event: Finished) -> list[Entry]:
        if choice.request.lens is None:
            return []
        positions = [position for position, _ in event.prompt_lens]
        tokens = [event.prompt[position] for position in positions]
        entries = self._token_texts.lens(tokens, choice.request.lens, [layers for _, layers in event.prompt_lens])
        return [{"position": position} | entry for position, entry in zip(positions, entries, strict=True)]

    def _log(self, job: Job, choice: RunningChoice, event: Finished) -> None:
        if event.monitored and self._monitor_log:
            self._monitor_log.add(job, choice.run.id if choice.run and job.may_store else None, event)
        memory = event.memory
        logger.info(
            "request %s (%s): %s, %d prompt and %d generated tokens; memory before %s, peak %s, after %s",
            choice.request.id,
            job.request_id,  # Serve adds it to its own lines, but not on the engine's thread
            event.reason,
            len(event.prompt),
            len(event.tokens),
            *(f"{size / 2**20:.1f} MiB" for size in (memory.before, memory.peak, memory.after)),
        )

    def _ended(self, ticket: Ticket, task: asyncio.Task[None]) -> None:
        ticket.tasks.discard(task)
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            self._fail(ticket, error)

    def _fail(self, ticket: Ticket, error: Exception) -> None:
        logger.error("request %s (%s) failed", ticket.job.id, ticket.job.request_id, exc_info=error)
        message = f"the server failed on request {ticket.job.request_id or ticket.job.id}; its log says why"
        ticket.messages.put_nowait(Refusal(message, None, "internal_error", 500))


def _edit_reports(edits: Sequence[Edit]) -> Iterator[EditReport]:
    """The reports of edits that have a gate or a report."""
    for edit in edits:
        lag = edit.gate.lag if edit.gate else None
        if edit.report:
            yield EditReport(edit.field, edit.point.name, lag, *edit.report.summary)
        elif edit.gate:
            yield EditReport(edit.field, edit.point.name, lag)


def _norms(edits: Sequence[Edit]) -> Iterator[ChangedNorm]:
    for edit in edits:
        if edit.norms and (summary := edit.norms.summary):
            yield ChangedNorm(edit.field, edit.point.name, *summary)
