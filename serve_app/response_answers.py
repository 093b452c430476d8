"""Converts a replica's messages into OpenAI's responses, whole or as typed events."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from deployments.messages import End, Entry, Message, Piece
from serve_app.answers import Answer, files_of
from serve_app.http.errors import ApiError
from serve_app.schemas.responses import ResponseRequest

Event = dict[str, Any]
PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}  # of items' ids


class ResponseAnswer(Answer):
    """One response."""

    def __init__(self, job_id: str, body: ResponseRequest, keep: Callable[[dict[str, Any]], None]):
        """Start the response to a request; `keep` is called with it at its end."""
        super().__init__("chat", job_id, body.model, sequences=1, per_prompt=1)
        self._keep = keep
        self._output: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None  # the last item of the output, until it is whole
        self._text: list[str] = []  # of the open item
        self._entries: list[Entry] = []  # logprobs for the next message that closes
        self._fields = Piece(0)  # all pieces, without their texts, calls and logprobs
        self._number = 0  # of the next event
        self._response: dict[str, Any] = {
            "id": f"resp_{job_id}",
            "object": "response",
            "created_at": self._head["created"],
            "model": body.model,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "output": [],
            "usage": None,
        } | body.repeated

    def whole(self, messages: Iterable[Message]) -> dict[str, Any]:
        """The response as one body; as `Answer.whole`."""
        for message in messages:
            self._note(message)
        for _ in (*self._added(self._ended[0].piece), *self._ending()):
            pass  # the events fill the response
        return self._response

    # ---- streamed

    def _begun(self, first: list[Message]) -> Iterator[str]:
        for kind in ("response.created", "response.in_progress"):
            yield self._sent({"type": kind, "response": self._response})

    def _events(self, message: Message) -> Iterator[str]:
        self._note(message)
        if isinstance(message, Piece | End):
            yield from map(self._sent, self._added(message.piece if isinstance(message, End) else message))

    def _finished(self, usage: bool) -> Iterator[str]:
        yield from map(self._sent, self._ending())

    def _failed(self, error: ApiError) -> str:
        """Both events for a failure: for the second, the openai package raises its error."""
        reason = {"code": "server_error", "message": error.message}
        failed = self._response | {"status": "failed", "error": reason, "output": self._output}
        said = {"code": error.code, "message": error.message, "param": error.param}
        first = self._sent({"type": "response.failed", "response": failed})
        return first + self._sent({"type": "error"} | said | error.body)

    def _sent(self, event: Event) -> str:
        event["sequence_number"] = self._number
        self._number += 1
        return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"

    # ---- items

    def _added(self, piece: Piece) -> Iterator[Event]:
        """Add a piece to the output; gives its events."""
        fields, entries = self._fields, [entry for entry, _ in piece.logprobs]
        fields.token_ids += piece.token_ids
        fields.prompt_ids += piece.prompt_ids
        fields.readouts += piece.readouts
        if piece.lens is not None:
            fields.lens = fields.lens or []
            fields.lens += piece.lens
        if piece.reasoning:
            yield from self._opened("reasoning", summary=[], content=[])
            yield self._delta("response.reasoning_text.delta", piece.reasoning)
        if piece.text:
            yield from self._opened("message", role="assistant", content=[])
            yield self._delta("response.output_text.delta", piece.text) | {"logprobs": entries}
        self._entries += entries
        for part in piece.tool_calls:
            if part.id:
                yield from self._opened("function_call", call_id=part.id, name=part.name, arguments="")
            if part.arguments:
                yield self._delta("response.function_call_arguments.delta", part.arguments)

    def _at(self, item: dict[str, Any], kind: str, **fields: Any) -> Event:
        """An event of the open item."""
        place = {"item_id": item["id"], "output_index": len(self._output) - 1}
        return {"type": kind} | place | ({} if item["type"] == "function_call" else {"content_index": 0}) | fields

    def _delta(self, kind: str, text: str) -> Event:
        self._text.append(text)
        return self._at(self._output[-1], kind, delta=text)

    def _opened(self, kind: str, **fields: Any) -> Iterator[Event]:
        """Open an item, unless a text of this kind is open."""
        if kind != "function_call" and self._open and self._open["type"] == kind:
            return
        yield from self._closed()
        item_id = f"{PREFIXES[kind]}_{uuid.uuid4().hex}"
        self._open = item = {"type": kind, "id": item_id, "status": "in_progress"} | fields
        self._output.append(item)
        yield {"type": "response.output_item.added", "output_index": len(self._output) - 1, "item": item}
        if kind != "function_call":
            yield self._at(item, "response.content_part.added", part=_part(kind, "", []))

    def _closed(self, status: str = "completed") -> Iterator[Event]:
        """Close the open item, if there is one."""
        item, text = self._open, "".join(self._text)
        if item is None:
            return
        self._open, self._text = None, []
        item["status"] = status
        if item["type"] == "function_call":
            item["arguments"] = text
            yield self._at(item, "response.function_call_arguments.done", name=item["name"], arguments=text)
        else:
            part = _part(item["type"], text, self._entries)
            item["content"] = [part]
            if item["type"] == "message":
                self._entries = []
                yield self._at(item, "response.output_text.done", text=text, logprobs=part["logprobs"])
            else:
                yield self._at(item, "response.reasoning_text.done", text=text)
            yield self._at(item, "response.content_part.done", part=part)
        yield {"type": "response.output_item.done", "output_index": len(self._output) - 1, "item": item}

    def _ending(self) -> Iterator[Event]:
        """The last events; the very last has the whole response, which is kept."""
        end, usage = self._ended[0], self._usage()
        status = "incomplete" if end.finish_reason == "length" else "completed"
        if not self._output:  # many templates refuse two questions in a row
            yield from self._opened("message", role="assistant", content=[])
        yield from self._closed(status)
        fields = self._of_end(end, self._fields) | self._prompt_ids(self._fields) | files_of(end.run)
        del fields["logprobs"]  # the messages have them
        if meta := self._activations():
            fields["activations_meta"] = meta
        self._response |= fields | {"status": status, "output": self._output}
        if status == "incomplete":
            self._response["incomplete_details"] = {"reason": "max_output_tokens"}
        self._response["usage"] = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"] | {"cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }
        self._keep(self._response)
        yield {"type": f"response.{status}", "response": self._response}


def _part(kind: str, text: str, entries: list[Entry]) -> dict[str, Any]:
    """The content of a message or of thoughts."""
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": entries}
