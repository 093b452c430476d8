"""Running jobs, and the messages that each of their choices has to send next."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from deployments.engine.request import Request
from deployments.job import Job
from deployments.messages import CallPart, Message, Piece, ReadoutValues, TokenLayers, TokenLogprob

if TYPE_CHECKING:  # Serve's controller and proxies import this module, and need no torch
    from deployments.chat.prompts import Echo
    from deployments.chat.reader import AnswerParts, AnswerReader
    from deployments.replica.open_run import OpenRun


@dataclass(eq=False)
class RunningChoice:
    """One running sequence of a job, and its next message.

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
        lens: Tokens whose layers go with it, if they are requested.
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
        """The fields of a message for the tokens since the last message."""
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
    """A running job.

    Attributes:
        job: The job.
        choices: Its choices by engine request id.
        messages: Its messages, as they come.
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
