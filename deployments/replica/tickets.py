"""Running jobs, and the next messages of each choice."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from deployments.engine.request import Request
from deployments.job import Job
from deployments.messages import CallPart, Message, Piece, TokenLayers, TokenLogprob
from deployments.readouts.spec import ReadoutRows

if TYPE_CHECKING:  # Serve's controller and proxies import this module, and need no torch
    from deployments.chat.prompts import Echo
    from deployments.chat.reader import AnswerParts, AnswerReader
    from deployments.replica.open_run import RunWriter


@dataclass(eq=False)
class RunningChoice:
    """One running sequence of a job, and its next message.

    Attributes:
        index: The choice's index in the job.
        request: The engine's request.
        reader: Finds reasoning and tool calls in its text.
        run: Receives its recorded rows.
        echo: The prompt at the start of its text.
        text: Text to send next.
        reasoning: Reasoning to send next.
        calls: Parts of tool calls to send next.
        scored: Tokens with logprobs for the next message.
        lens: Tokens with the logit lens for the next message, if requested.
        token_ids: Token ids for the next message.
        prompt_ids: The prompt's token ids, for the first message.
        readouts: Rows of readouts for the next message.
        logprob: The sum over all its tokens.
        ended: The engine has ended it.
    """

    index: int
    request: Request
    reader: AnswerReader | None = None
    run: RunWriter | None = None
    echo: Echo | None = None
    text: str = ""
    reasoning: str = ""
    calls: tuple[CallPart, ...] = ()
    scored: list[TokenLogprob] = field(default_factory=list)
    lens: list[TokenLayers] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    prompt_ids: tuple[int, ...] = ()
    readouts: list[ReadoutRows] = field(default_factory=list)
    logprob: float = 0.0
    ended: bool = False

    def add(self, text: str) -> None:
        """Append the model's next text."""
        if self.reader:
            self._take(self.reader.add(text))
        else:
            self.text += text

    def close(self) -> None:
        """Append the text that the reader held back, at the end."""
        if self.reader:
            self._take(self.reader.close())

    def _take(self, written: AnswerParts) -> None:
        self.text += written.content
        self.reasoning += written.reasoning
        self.calls += written.tool_calls

    def take_piece(self) -> Piece | None:
        """The next message, or None; logprobs and lens of tokens whose text is held back wait with it."""
        if not (self.text or self.reasoning or self.calls):
            return None
        piece = Piece(self.index, self.text, self.calls, reasoning=self.reasoning, **self.take_tokens())
        self.text, self.reasoning, self.calls = "", "", ()
        return piece

    def take_tokens(self) -> dict[str, Any]:
        """The fields of a message about the tokens since the last message."""
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
        """Send a choice's next message, if there is one."""
        if piece := choice.take_piece():
            self.messages.put_nowait(piece)
