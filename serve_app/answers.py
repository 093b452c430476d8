"""A replica's messages as OpenAI's answers, whole or streamed."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from deployments.messages import End, Message, Piece, Refusal, RunReport, TokenLogprob
from serve_app.errors import ApiError, render
from serve_app.logprobs import of_chat, of_completion

Kind = Literal["chat", "completion"]


@dataclass
class Choice:
    """One choice as it gathers."""

    text: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    end: End | None = None


class Answer:
    """One request's answer."""

    def __init__(self, kind: Kind, request_id: str, model: str, choices: int, per_prompt: int) -> None:
        """Begin an answer.

        Args:
            kind: Chat or completion.
            request_id: Becomes part of the answer's id.
            model: The model's id.
            choices: How many choices there will be.
            per_prompt: How many of them share a prompt, which usage counts once.
        """
        self._kind = kind
        self._logprobs = of_chat if kind == "chat" else of_completion
        self._choices = [Choice() for _ in range(choices)]
        self._per_prompt = per_prompt
        self._head = {
            "id": f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{request_id}",
            "object": "",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, messages: Iterable[Message]) -> dict[str, Any]:
        """The answer in one body.

        Raises:
            ApiError: The replica refused.
        """
        for message in messages:
            self._note(message)
        choices = [self._choice(index, choice) for index, choice in enumerate(self._choices)]
        kind = "chat.completion" if self._kind == "chat" else "text_completion"
        body = self._head | {"object": kind, "choices": choices, "usage": self._usage()}
        meta = self._activations()
        return body | ({"activations_meta": meta} if meta else {})

    def refuse(self, messages: Iterable[Message]) -> None:
        """Raise a refusal among the first messages, while the HTTP status can still say it.

        Raises:
            ApiError: There is one.
        """
        for message in messages:
            if isinstance(message, Refusal):
                raise ApiError.of(message)

    async def stream(
        self, gathered: AsyncIterator[list[Message]], first: list[Message], usage: bool
    ) -> AsyncIterator[str]:
        """The answer as server-sent events; an error becomes the last of them.

        Args:
            gathered: What the replica goes on to say.
            first: What it has said already.
            usage: Whether a chunk of usage is asked for.
        """
        try:
            if self._kind == "chat":
                for index in range(len(self._choices)):
                    yield self._event([self._chunk(index, {"role": "assistant", "content": ""})])
            for message in first:
                for event in self._events(message):
                    yield event
            async for messages in gathered:
                for message in messages:
                    for event in self._events(message):
                        yield event
        except Exception as error:  # noqa: BLE001 - the head is sent: all that is left is to say it here
            yield f"data: {json.dumps(render(error, str(self._head['id'])).body)}\n\n"
            return
        if usage:
            yield self._event([], usage=self._usage())
        if meta := self._activations():
            yield self._event([], activations_meta=meta)
        yield "data: [DONE]\n\n"

    def _note(self, message: Message) -> None:
        if isinstance(message, Refusal):
            raise ApiError.of(message)
        choice = self._choices[message.index]
        choice.logprobs.extend(message.logprobs)
        if isinstance(message, End):
            choice.end = message
        else:
            choice.text += message.text
            choice.tool_calls.extend(message.tool_calls)

    # ---- whole

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        assert choice.end is not None
        where = _where(choice.end.run)
        scores = self._logprobs(choice.logprobs)
        common = {"index": index, "finish_reason": choice.end.finish_reason, "logprobs": scores}
        if self._kind == "completion":
            return common | {"text": choice.text} | where
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.tool_calls:
            message |= {"content": choice.text or None, "tool_calls": choice.tool_calls}
        return common | {"message": message | where}

    def _usage(self) -> dict[str, int]:
        ends = [choice.end for choice in self._choices if choice.end]
        prompt = sum(end.prompt_tokens for end in ends[:: self._per_prompt])
        completion = sum(end.completion_tokens for end in ends)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def _activations(self) -> dict[str, Any] | None:
        """`activations_meta`; failed as a whole where one of its runs failed."""
        runs = [(i, choice.end.run) for i, choice in enumerate(self._choices) if choice.end and choice.end.run]
        if not runs:
            return None
        failed = next((run for _, run in runs if run.status == "failed"), None)
        status = failed or runs[0][1]
        meta: dict[str, Any] = {"session_id": status.session_id, "status": status.status}
        if failed:
            meta["reason"] = failed.reason
        return meta | {"runs": [{"index": index} | _report(run) for index, run in runs]}

    # ---- streamed

    def _events(self, message: Message) -> Iterator[str]:
        self._note(message)
        if isinstance(message, Piece):
            delta: dict[str, Any] = {"content": message.text} if message.text else {}
            if message.tool_calls:
                calls = self._choices[message.index].tool_calls
                first = len(calls) - len(message.tool_calls)
                delta["tool_calls"] = [{"index": first + i} | call for i, call in enumerate(message.tool_calls)]
            yield self._event([self._chunk(message.index, delta, tokens=message.logprobs)])
        elif isinstance(message, End):
            where = _where(message.run)
            yield self._event([self._chunk(message.index, where, message.finish_reason, message.logprobs)])

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        finish_reason: str | None = None,
        tokens: Sequence[TokenLogprob] = (),
    ) -> dict[str, Any]:
        head = {"index": index, "finish_reason": finish_reason, "logprobs": self._logprobs(tokens)}
        if self._kind == "chat":
            return head | {"delta": delta}
        return head | {"text": delta.pop("content", "")} | delta

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> str:
        kind = "chat.completion.chunk" if self._kind == "chat" else "text_completion"
        return f"data: {json.dumps(self._head | {'object': kind, 'choices': choices} | more)}\n\n"


def _where(run: RunReport | None) -> dict[str, Any]:
    """What a message or choice says of its own run."""
    if run is None:
        return {}
    files = {name: point["uri"] for name, point in run.points.items() if "uri" in point}
    return {"run_id": run.run_id, "session_id": run.session_id, "activation_files": files}


def _report(run: RunReport) -> dict[str, Any]:
    report = asdict(run)
    if report["reason"] is None:
        del report["reason"]
    return report
