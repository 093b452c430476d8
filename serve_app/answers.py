"""Converts a replica's messages into OpenAI's answers, whole or streamed."""

from __future__ import annotations

import json
import math
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from deployments.messages import (
    CallPart,
    End,
    Message,
    Piece,
    Refusal,
    RunReport,
    TokenLayers,
    TokenLogprob,
    whole_calls,
)
from deployments.readouts.spec import ReadoutRows
from serve_app.http.errors import ApiError, render
from serve_app.logprobs import of_chat, of_completion, of_lens

Kind = Literal["chat", "completion"]


@dataclass
class AnswerChoice:
    """One choice as its messages arrive."""

    text: str = ""
    reasoning: str = ""
    tool_calls: list[CallPart] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    prompt_ids: tuple[int, ...] = ()
    lens: list[TokenLayers] | None = None
    readouts: list[ReadoutRows] = field(default_factory=list)
    end: End | None = None


class Answer:
    """One request's answer."""

    def __init__(
        self, kind: Kind, job_id: str, model: str, sequences: int, per_prompt: int, returned: int | None = None
    ) -> None:
        """Start an answer.

        Args:
            kind: Chat or completion.
            job_id: Becomes part of the answer's id.
            model: The model's id.
            sequences: The number of sequences that run.
            per_prompt: The number of them for each prompt; usage counts a prompt once.
            returned: The number of likeliest ones among these that become choices; by default all.
        """
        self._kind = kind
        self._logprobs = of_chat if kind == "chat" else of_completion
        self._choices = [AnswerChoice() for _ in range(sequences)]
        self._per_prompt = per_prompt
        self._returned = returned or per_prompt
        self._head = {
            "id": f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{job_id}",
            "object": "",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": None,
        }

    def whole(self, messages: Iterable[Message]) -> dict[str, Any]:
        """The answer as one body.

        Raises:
            ApiError: The replica rejected the request.
        """
        for message in messages:
            self._note(message)
        choices = [self._choice(index, choice) for index, choice in enumerate(self._best())]
        kind = "chat.completion" if self._kind == "chat" else "text_completion"
        body = self._head | {"object": kind, "choices": choices, "usage": self._usage()}
        body |= self._prompt_ids(self._choices[0])
        meta = self._activations()
        return body | ({"activations_meta": meta} if meta else {})

    async def stream(
        self, gathered: AsyncIterator[list[Message]], first: list[Message], usage: bool, request_id: str
    ) -> AsyncIterator[str]:
        """The answer as server-sent events; an error becomes the last of them.

        Args:
            gathered: The replica's further messages.
            first: Its first messages.
            usage: Whether a chunk of usage is requested.
            request_id: The request's id for the client and the log.
        """
        if usage:
            self._head["usage"] = None  # as OpenAI: each chunk has the field, and the last one its value
        try:
            if self._kind == "chat":
                known = self._prompt_ids(first[0]) if first and not isinstance(first[0], Refusal) else {}
                for index in range(len(self._choices)):
                    begun = self._chunk(index, {"role": "assistant", "content": "", "refusal": None})
                    yield self._event([begun], **known)
            for message in first:
                for event in self._events(message):
                    yield event
            async for messages in gathered:
                for message in messages:
                    for event in self._events(message):
                        yield event
        except Exception as error:  # noqa: BLE001 - the status is already sent: the error goes into the stream
            yield f"data: {json.dumps(render(error, request_id).body)}\n\n"
            return
        # One chunk for both: the openai package keeps only the last chunk's usage.
        last: dict[str, Any] = {"usage": self._usage()} if usage else {}
        if meta := self._activations():
            last["activations_meta"] = meta
        if last:
            yield self._event([], **last)
        yield "data: [DONE]\n\n"

    def _note(self, message: Message) -> None:
        if isinstance(message, Refusal):
            raise ApiError.of(message)
        choice = self._choices[message.index]
        choice.logprobs.extend(message.logprobs)
        choice.token_ids.extend(message.token_ids)
        choice.prompt_ids = choice.prompt_ids or message.prompt_ids
        choice.readouts.extend(message.readouts)
        if message.lens is not None:
            choice.lens = choice.lens or []
            choice.lens.extend(message.lens)
        if isinstance(message, End):
            choice.end = message
        else:
            choice.text += message.text
            choice.reasoning += message.reasoning
            choice.tool_calls.extend(message.tool_calls)

    # ---- whole

    def _best(self) -> list[AnswerChoice]:
        """The returned sequences of each prompt; if some are left out, the likeliest in order."""
        if self._returned == self._per_prompt:
            return self._choices
        best = []
        for first in range(0, len(self._choices), self._per_prompt):
            ranked = sorted(self._choices[first : first + self._per_prompt], key=_likeliness, reverse=True)
            best += ranked[: self._returned]
        return best

    def _prompt_ids(self, part: AnswerChoice | Piece | End) -> dict[str, Any]:
        """A chat's field with its prompt's token ids, if requested."""
        return {"prompt_token_ids": list(part.prompt_ids)} if self._kind == "chat" and part.prompt_ids else {}

    def _seen(self, part: AnswerChoice | Piece | End) -> dict[str, Any]:
        """A choice's fields besides OpenAI's: token ids and the logit lens, if requested."""
        end = part.end if isinstance(part, AnswerChoice) else part
        prompt = end.prompt_lens if isinstance(end, End) else ()
        lens = {} if part.lens is None else {"logit_lens": of_lens(part.lens, prompt)}
        return self._token_ids(part) | lens | _of_readouts(part.readouts)

    def _token_ids(self, part: AnswerChoice | Piece | End) -> dict[str, Any]:
        """A choice's token ids, if requested; in a completion also its prompt's."""
        said = {"token_ids": list(part.token_ids)} if part.token_ids or part.prompt_ids else {}
        if self._kind == "completion" and part.prompt_ids:
            said["prompt_token_ids"] = list(part.prompt_ids)
        return said

    def _choice(self, index: int, choice: AnswerChoice) -> dict[str, Any]:
        assert choice.end is not None
        where = _where(choice.end.run)
        scores = self._logprobs(choice.logprobs)
        common = {"index": index, "finish_reason": choice.end.finish_reason, "logprobs": scores}
        common |= self._seen(choice) | _norms(choice.end) | _of_edits(choice.end)
        if self._kind == "completion":
            return common | {"text": choice.text} | where
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.tool_calls:
            calls = [_call(call) for call in whole_calls(choice.tool_calls)]
            message |= {"content": choice.text or None, "tool_calls": calls}
        if choice.reasoning:
            message["reasoning_content"] = choice.reasoning
        return common | {"message": message | where}

    def _usage(self) -> dict[str, Any]:
        ends = [choice.end for choice in self._choices if choice.end]
        prompt = sum(end.prompt_tokens for end in ends[:: self._per_prompt])
        completion = sum(end.completion_tokens for end in ends)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(end.cached_tokens for end in ends[:: self._per_prompt])},
        }

    def _activations(self) -> dict[str, Any] | None:
        """`activations_meta`; an error if one of its runs failed."""
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
            said: Piece | None = message
            for delta in self._deltas(message):
                yield self._event([self._chunk(message.index, delta, said=said)])
                said = None
        elif isinstance(message, End):
            where = _where(message.run)
            chunk = self._chunk(message.index, where, message.finish_reason, message) | _norms(message)
            chunk |= _of_edits(message)
            yield self._event([chunk])

    def _deltas(self, piece: Piece) -> Iterator[dict[str, Any]]:
        """A piece's deltas: text first, then each part of a call separately, because clients rely on the order."""
        said: dict[str, Any] = {"reasoning_content": piece.reasoning, "content": piece.text}
        delta = {name: text for name, text in said.items() if text}
        if delta or not piece.tool_calls:
            yield delta
        for part in piece.tool_calls:
            function = {"arguments": part.arguments}
            yield {"tool_calls": [{"index": part.number} | (_call(part) if part.id else {"function": function})]}

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        finish_reason: str | None = None,
        said: Piece | End | None = None,
    ) -> dict[str, Any]:
        scores = self._logprobs(said.logprobs if said else ())
        head = {"index": index, "finish_reason": finish_reason, "logprobs": scores}
        head |= self._seen(said) if said else {}
        if self._kind == "chat":
            return head | {"delta": delta}
        return head | {"text": delta.pop("content", "")} | delta

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> str:
        kind = "chat.completion.chunk" if self._kind == "chat" else "text_completion"
        return f"data: {json.dumps(self._head | {'object': kind, 'choices': choices} | more)}\n\n"


def _norms(end: End) -> dict[str, Any]:
    """The field of a choice with the norms that interventions used as their unit."""
    return {"norms": [one._asdict() | {"norm": _finite(one.norm)} for one in end.norms]} if end.norms else {}


def _call(call: CallPart) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _likeliness(choice: AnswerChoice) -> float:
    assert choice.end is not None
    return choice.end.likeliness


def _where(run: RunReport | None) -> dict[str, Any]:
    """The fields of a message or choice for its own run."""
    if run is None:
        return {}
    files = {name: point["uri"] for name, point in run.points.items() if "uri" in point}
    return {"run_id": run.run_id, "session_id": run.session_id, "activation_files": files}


def _report(run: RunReport) -> dict[str, Any]:
    report = asdict(run)
    return {name: value for name, value in report.items() if value is not None or name != "reason"}


def _of_readouts(parts: Iterable[ReadoutRows]) -> dict[str, Any]:
    """The fields of a choice or a chunk for readouts; empty if there are none.

    `first` is the index, within its phase, of the first token with values; if the tokens are not consecutive, `index`
    lists them. A value that is not finite is null.
    """
    found: dict[str, Any] = {}
    for part in parts:
        one = found.setdefault(part.name, {"labels": list(part.labels)} if part.labels else {})
        began = {"first": part.index[0], "index": [], "values": []}
        phase = one.setdefault("generated" if part.generated else "prompt", began)
        phase["index"] += part.index
        phase["values"] += _rows(part)
    for one in found.values():
        for phase in (one[name] for name in ("prompt", "generated") if name in one):
            index = phase["index"]
            if index == list(range(index[0], index[0] + len(index))):
                del phase["index"]
    return {"readouts": found} if found else {}


def _rows(part: ReadoutRows) -> list[Any]:
    if part.features is None:
        return [[_finite(value) for value in row] for row in part.values]
    pairs = zip(part.features, part.values, strict=True)
    return [
        [{"feature": feature, "value": _finite(value)} for feature, value in zip(features, row, strict=True) if value]
        for features, row in pairs
    ]


def _finite(value: Any) -> Any:
    """None instead of a number that is not finite, which JSON cannot express."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _of_edits(end: End) -> dict[str, Any]:
    """The fields of a choice for gated or reported interventions, and for the row that ended the answer."""
    said: dict[str, Any] = {}
    if end.edits:
        said["report"] = [
            {name: _finite(value) for name, value in one._asdict().items() if value is not None} for one in end.edits
        ]
    if end.stop_reason:
        said["stop_reason"] = end.stop_reason._asdict() | {"value": _finite(end.stop_reason.value)}
    return said
