"""Running jobs, and the next messages of each choice."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deployments.engine.request import Request
from deployments.job import Job
from deployments.messages import Message, Piece

if TYPE_CHECKING:  # Serve's controller and proxies import this module, and need no torch
    from deployments.chat.prompts import Echo
    from deployments.chat.reader import AnswerParts, AnswerReader
    from deployments.replica.open_run import RunWriter


@dataclass(eq=False)
class RunningChoice:
    """One running sequence of a job, and its next message.

    Attributes:
        request: The engine's request.
        piece: Its next message.
        reader: Finds reasoning and tool calls in its text.
        run: Receives its recorded rows.
        echo: The prompt at the start of its text.
        logprob: The sum over all its tokens.
        ended: The engine has ended it.
    """

    request: Request
    piece: Piece
    reader: AnswerReader | None = None
    run: RunWriter | None = None
    echo: Echo | None = None
    logprob: float = 0.0
    ended: bool = False

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
