"""Converts a replica's messages into OpenAI's answers, whole or streamed."""

from __future__ import annotations

import json
import math
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Any, Literal

from deployments.messages import CallPart, End, Entry, Message, Piece, Refusal, RunReport, whole_calls
from deployments.readouts.spec import ReadoutRows
from serve_app.http.errors import ApiError, render

Kind = Literal["chat", "completion"]


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
        self._sequences = sequences
        self._per_prompt = per_prompt
        self._returned = returned or per_prompt
        self._ended: dict[int, End] = {}
        self._head = {
            "id": f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{job_id}",
            "object": "",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": None,
        }

    @property
    def _ends(self) -> list[End]:
        """The ends of all sequences so far, in their order."""
        return [end for _, end in sorted(self._ended.items())]

    def whole(self, messages: Iterable[Message]) -> dict[str, Any]:
        """The answer as one body, from the ends of all sequences.

        Raises:
            ApiError: The replica rejected the request.
        """
        for message in messages:
            self._note(message)
        choices = [self._choice(index, end) for index, end in enumerate(self._best())]
        kind = "chat.completion" if self._kind == "chat" else "text_completion"
        body = self._head | {"object": kind, "choices": choices, "usage": self._usage()}
        body |= self._prompt_ids(self._ended[0])
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
            for event in self._begun(first):
                yield event
            for message in first:
                for event in self._events(message):
                    yield event
            async for messages in gathered:
                for message in messages:
                    for event in self._events(message):
                        yield event
        except Exception as error:  # noqa: BLE001 - the status is already sent: the error goes into the stream
            yield self._failed(render(error, request_id))
            return
        for event in self._finished(usage):
            yield event

    def _note(self, message: Message) -> None:
        if isinstance(message, Refusal):
            raise ApiError.of(message)
        if isinstance(message, End):
            self._ended[message.index] = message

    @property
    def spent(self) -> tuple[int, int]:
        """The tokens of prompts, each counted once, and of answers; of an answer that was cut, the replica counts."""
        if len(self._ended) < self._sequences:
            return 0, 0
        usage = self._usage()
        return usage["prompt_tokens"], usage["completion_tokens"]

    def _prompt_ids(self, message: Message) -> dict[str, Any]:
        """A chat's field with its prompt's token ids, if requested."""
        piece = message.piece if isinstance(message, End) else message
        if self._kind == "completion" or isinstance(piece, Refusal) or not piece.prompt_ids:
            return {}
        return {"prompt_token_ids": piece.prompt_ids}

    def _of_tokens(self, piece: Piece, prompt_lens: Sequence[Entry] = ()) -> dict[str, Any]:
        """A choice's fields for the tokens of a piece."""
        fields: dict[str, Any] = {"logprobs": self._logprobs(piece.logprobs)}
        if piece.token_ids or piece.prompt_ids:
            fields["token_ids"] = piece.token_ids
        if self._kind == "completion" and piece.prompt_ids:
            fields["prompt_token_ids"] = piece.prompt_ids
        if piece.lens is not None:
            fields["logit_lens"] = {"content": piece.lens} | ({"prompt": prompt_lens} if prompt_lens else {})
        return fields | _of_readouts(piece.readouts)

    def _of_end(self, end: End, piece: Piece) -> dict[str, Any]:
        """A choice's fields for the tokens of a piece and for its end."""
        return self._of_tokens(piece, end.prompt_lens) | _of_edits(end)

    def _logprobs(self, tokens: Sequence[tuple[Entry, int]]) -> dict[str, Any] | None:
        """`choices[].logprobs`; None without tokens.

        In a completion, as in OpenAI's API, the token itself is among the top tokens, so there may be one more than
        requested. A prompt's first token has neither.
        """
        if not tokens:
            return None
        entries = [entry for entry, _ in tokens]
        if self._kind == "chat":
            return {"content": entries, "refusal": None}
        return {
            "tokens": [entry["token"] for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": [_by_text(entry) for entry in entries],
            "text_offset": [offset for _, offset in tokens],
        }

    def _usage(self) -> dict[str, Any]:
        ends = self._ends
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
        runs = [(end.index, end.run) for end in self._ends if end.run]
        if not runs:
            return None
        failed = next((run for _, run in runs if run.status == "failed"), None)
        status = failed or runs[0][1]
        meta: dict[str, Any] = {"session_id": status.session_id, "status": status.status}
        if failed:
            meta["reason"] = failed.reason
        return meta | {"runs": [{"index": index} | _report(run) for index, run in runs]}

    # ---- whole

    def _best(self) -> list[End]:
        """The returned sequences of each prompt; if some are left out, the likeliest in order."""
        ends = self._ends
        if self._returned == self._per_prompt:
            return ends
        best = []
        for first in range(0, len(ends), self._per_prompt):
            ranked = sorted(ends[first : first + self._per_prompt], key=lambda end: end.likeliness, reverse=True)
            best += ranked[: self._returned]
        return best

    def _choice(self, index: int, end: End) -> dict[str, Any]:
        piece, files = end.piece, files_of(end.run)
        common = {"index": index, "finish_reason": end.finish_reason}
        common |= self._of_end(end, piece)
        if self._kind == "completion":
            return common | {"text": piece.text} | files
        message: dict[str, Any] = {"role": "assistant", "content": piece.text, "refusal": None}
        if piece.tool_calls:
            calls = [_call(call) for call in whole_calls(piece.tool_calls)]
            message |= {"content": piece.text or None, "tool_calls": calls}
        if piece.reasoning:
            message["reasoning_content"] = piece.reasoning
        return common | {"message": message | files}

    # ---- streamed

    def _begun(self, first: list[Message]) -> Iterator[str]:
        if self._kind == "chat":
            known = self._prompt_ids(first[0]) if first else {}
            for index in range(self._sequences):
                begun = self._chunk(index, {"role": "assistant", "content": "", "refusal": None})
                yield self._event([begun], **known)

    def _failed(self, error: ApiError) -> str:
        return f"data: {json.dumps(error.body)}\n\n"

    def _finished(self, usage: bool) -> Iterator[str]:
        # One chunk for both: the openai package keeps only the last chunk's usage.
        last: dict[str, Any] = {"usage": self._usage()} if usage else {}
        if meta := self._activations():
            last["activations_meta"] = meta
        if last:
            yield self._event([], **last)
        yield "data: [DONE]\n\n"

    def _events(self, message: Message) -> Iterator[str]:
        self._note(message)
        if isinstance(message, Piece):
            fields = self._of_tokens(message)
            for delta in _deltas(message):
                yield self._event([self._chunk(message.index, delta) | fields])
                fields = {}
        elif isinstance(message, End):
            chunk = self._chunk(message.index, files_of(message.run), message.finish_reason)
            yield self._event([chunk | self._of_end(message, message.piece)])

    def _chunk(self, index: int, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        head = {"index": index, "finish_reason": finish_reason, "logprobs": None}
        return head | ({"delta": delta} if self._kind == "chat" else {"text": delta.pop("content", "")} | delta)

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> str:
        kind = "chat.completion.chunk" if self._kind == "chat" else "text_completion"
        return f"data: {json.dumps(self._head | {'object': kind, 'choices': choices} | more)}\n\n"


def _by_text(entry: Entry) -> dict[str, float] | None:
    logprobs: dict[str, float] = {}
    for candidate in (*entry["top_logprobs"], entry):  # of two tokens with the same text, the likelier
        if candidate["logprob"] is not None:
            logprobs.setdefault(candidate["token"], candidate["logprob"])
    return logprobs or None


def _deltas(piece: Piece) -> Iterator[dict[str, Any]]:
    """A piece's deltas: text first, then each part of a call separately, because clients rely on the order."""
    texts = {"reasoning_content": piece.reasoning, "content": piece.text}
    delta: dict[str, Any] = {name: text for name, text in texts.items() if text}
    if delta:
        yield delta
    for part in piece.tool_calls:
        function = {"arguments": part.arguments}
        yield {"tool_calls": [{"index": part.number} | (_call(part) if part.id else {"function": function})]}


def _call(call: CallPart) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def files_of(run: RunReport | None) -> dict[str, Any]:
    """The fields of a message or choice for its own run."""
    if run is None:
        return {}
    files = {name: point["uri"] for name, point in run.points.items() if "uri" in point}
    return {"run_id": run.run_id, "session_id": run.session_id, "activation_files": files}


def _report(run: RunReport) -> dict[str, Any]:
    return {name: value for name, value in vars(run).items() if value is not None or name != "reason"}


def _of_readouts(parts: Iterable[ReadoutRows]) -> dict[str, Any]:
    """The fields of a choice or a chunk for readouts; empty if there are none.

    `first` is the index, within its phase, of the first token with values; if the tokens are not consecutive, `index`
    lists them. A value that is not finite is null.
    """
    readouts: dict[str, Any] = {}
    for part in parts:
        readout = readouts.setdefault(part.name, {"labels": list(part.labels)} if part.labels else {})
        began = {"first": part.index[0], "index": [], "values": []}
        phase = readout.setdefault("generated" if part.generated else "prompt", began)
        phase["index"] += part.index
        phase["values"] += _rows(part)
    for readout in readouts.values():
        for phase in (readout[name] for name in ("prompt", "generated") if name in readout):
            index = phase["index"]
            if index == list(range(index[0], index[0] + len(index))):
                del phase["index"]
    return {"readouts": readouts} if readouts else {}


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
    """A choice's fields for the norms that interventions used, for gates and reports, and for the row that ended it."""
    fields: dict[str, Any] = {}
    if end.norms:
        fields["norms"] = [one._asdict() | {"norm": _finite(one.norm)} for one in end.norms]
    if end.edits:
        fields["report"] = [
            {name: _finite(value) for name, value in edit._asdict().items() if value is not None} for edit in end.edits
        ]
    if end.stop_reason:
        fields["stop_reason"] = end.stop_reason._asdict() | {"value": _finite(end.stop_reason.value)}
        if end.stop_reason.monitor is None:
            del fields["stop_reason"]["monitor"]
    return fields
