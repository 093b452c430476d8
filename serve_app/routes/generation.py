"""Chats and completions."""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, Header, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse

import serve_app.openapi_examples as examples
from deployments.accounts import Account
from deployments.job import Job
from deployments.messages import Refusal
from serve_app.answers import Answer
from serve_app.backend.backend import Backend
from serve_app.backend.preset_registry import ChosenPreset
from serve_app.http.bodies import JsonRoute, json_object
from serve_app.http.errors import ApiError, invalid
from serve_app.kept_responses import KeptResponses
from serve_app.openapi import errors
from serve_app.response_answers import ResponseAnswer
from serve_app.routes.dependencies import AppBackend, CallerAccount, PathId
from serve_app.schemas.generation import ChatRequest, CompletionRequest, Generation
from serve_app.schemas.presets import PRESET_NAME, merged
from serve_app.schemas.responses import ResponseRequest, messages_of
from serve_app.usage import Usage

PRESET = "X-Vitrine-Preset"  # of a request: the preset to use; of an answer: the one that was used
FIELDS = "X-Vitrine-Body"


class GenerationRoute(JsonRoute):
    """A route whose errors say whether a field is of the body or of its preset."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler that FastAPI calls with each request."""
        handle = super().get_route_handler()

        async def handle_with_preset(request: Request) -> Response:
            try:
                return await handle(request)
            except RequestValidationError as error:
                if not hasattr(request.state, "own"):  # the body as sent, if fields of a preset were added
                    raise
                assert self.body_field is not None
                if wrong := self.body_field.validate(request.state.own, loc=("body",))[1]:
                    raise RequestValidationError(wrong) from None
                refusal = invalid(error.errors())
                message = f"with the preset {request.state.preset!r}: {refusal.message}"
                raise ApiError(refusal.status, message, refusal.param, refusal.code) from None

        return handle_with_preset


async def _add_fields(
    request: Request,
    backend: AppBackend,
    who: CallerAccount,
    preset: Annotated[str | None, Header(alias=PRESET, max_length=256, description="The field `preset`.")] = None,
    fields: Annotated[
        str | None,
        Header(alias=FIELDS, max_length=1 << 15, description="A JSON object of fields; those of the body override it."),
    ] = None,
) -> ChosenPreset | None:
    """Add the fields of headers and of a preset below those of the body; return the preset with those that it adds.

    FastAPI calls this after it has read the body, and validates the same dict afterwards.
    """
    body = await request.json() if await request.body() else None
    if not isinstance(body, dict):
        return None
    below: dict[str, Any] = {} if preset is None else {"preset": preset}
    if fields is not None:  # for clients whose bodies cannot be changed
        below |= json_object(fields.encode("latin-1"), FIELDS)
    whole = merged(below, body)
    chosen: ChosenPreset | None = None
    model = whole.get("model")
    name = whole.get("preset") or whole.get("intervention_profile")
    if isinstance(model, str) and (name is None or (isinstance(name, str) and PRESET_NAME.fullmatch(name))):
        chosen = await backend.presets.chosen(who, name, model)
    if chosen is not None:
        request.state.own, request.state.preset = whole, chosen.name
        own = whole.keys() - {"interventions"}
        whole = merged(chosen.fields, whole, chosen.by_default)
        chosen = chosen._replace(fields={field: chosen.fields[field] for field in chosen.fields.keys() - own})
    body.clear()
    body.update(whole)
    return chosen


UsedPreset = Annotated[ChosenPreset | None, Depends(_add_fields)]
openai = APIRouter(tags=["OpenAI"], responses=errors(503), route_class=GenerationRoute)


GENERATION = examples.IS_ARCHIVED | errors(404, 429, 504)


@openai.post("/v1/chat/completions", responses=examples.CHAT | GENERATION)
async def chat(
    body: Annotated[ChatRequest, Body(openapi_examples=examples.CHAT_EXAMPLES)],
    preset: UsedPreset,
    request: Request,
    backend: AppBackend,
    who: CallerAccount,
) -> Response:
    """Answer a chat, streamed or whole, and record activations if `capture` or `store_activations` asks for it."""
    messages = [message.spoken for message in body.messages]
    fields = {"prompt": "messages", "max_tokens": body.limit[1]}
    job = _job(body, request, who, preset, messages=messages, fields=fields, **_of_chat(body))
    answer = Answer("chat", job.id, body.model, body.sequences, body.sequences)
    return await _answer(answer, body, job, backend, request.app.state.usage)


@openai.post("/v1/completions", responses=examples.COMPLETION | GENERATION)
async def completions(
    body: Annotated[CompletionRequest, Body(openapi_examples=examples.COMPLETION_EXAMPLES)],
    preset: UsedPreset,
    request: Request,
    backend: AppBackend,
    who: CallerAccount,
) -> Response:
    """Continue one prompt or several, streamed or whole, and record activations if the request asks for it."""
    job = _job(
        body,
        request,
        who,
        preset,
        prompts=body.prompts,
        max_tokens=body.max_tokens,
        logprobs=body.logprobs,
        echo=bool(body.echo),
        ranked=body.sequences > body.choices,
    )
    sequences = len(body.prompts) * body.sequences
    answer = Answer("completion", job.id, body.model, sequences, body.sequences, body.choices)
    return await _answer(answer, body, job, backend, request.app.state.usage)


@openai.post("/v1/responses", responses=examples.RESPONSE_STREAMED | GENERATION)
async def respond(
    body: Annotated[ResponseRequest, Body(openapi_examples=examples.RESPONSE_EXAMPLES)],
    preset: UsedPreset,
    request: Request,
    backend: AppBackend,
    who: CallerAccount,
) -> Response:
    """Answer a text or items in OpenAI's Responses API, streamed or whole, with all that chats can record."""
    kept: KeptResponses = request.app.state.responses
    conversation = body.messages
    if body.previous_response_id is not None:
        earlier = kept.get(who, body.previous_response_id, "previous_response_id", 400)
        conversation = json.loads(earlier.messages) + conversation

    def keep(response: dict[str, Any]) -> None:
        if body.store:
            kept.keep(who.owner, response, conversation + messages_of(response["output"]))

    instructions = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    chat = body.chat
    fields = {"prompt": "input", "messages": "input"}
    if body.max_output_tokens is not None:  # else a preset may have max_tokens
        fields["max_tokens"] = "max_output_tokens"
    if "format" in body.text.model_fields_set:
        fields["response_format"] = "text.format"
    job = _job(chat, request, who, preset, messages=instructions + conversation, fields=fields, **_of_chat(chat))
    return await _answer(ResponseAnswer(job.id, body, keep), chat, job, backend, request.app.state.usage)


@openai.get("/v1/responses/{response_id}", responses=examples.RESPONSE | errors(404))
async def retrieve_response(response_id: PathId, request: Request, who: CallerAccount) -> Response:
    """Show a response that is kept."""
    return Response(request.app.state.responses.get(who, response_id).body, media_type="application/json")


@openai.delete("/v1/responses/{response_id}", responses=examples.RESPONSE_DELETED | errors(404))
async def delete_response(response_id: PathId, request: Request, who: CallerAccount) -> dict[str, Any]:
    """Remove a response; others that continue it stay."""
    request.app.state.responses.delete(who, response_id)
    return {"id": response_id, "object": "response", "deleted": True}


def _of_chat(body: ChatRequest) -> dict[str, Any]:
    """A chat's own fields of a job, besides its messages."""
    return {
        "tools": body.callable_tools,
        "must_call": body.must_call,
        "parallel_calls": body.parallel_calls,
        "tool_call_format": body.tool_call_format,
        "template_kwargs": body.chat_template_kwargs or {},
        "ending": body.ending,
        "logprobs": body.likeliest,
        "max_tokens": body.limit[0],
    }


def _job(body: Generation, request: Request, who: Account, preset: ChosenPreset | None, **own: Any) -> Job:
    used = preset.fields if preset else {}
    return Job(
        id=uuid.uuid4().hex,  # names what it records: a client could choose another's X-Request-Id
        account=who,
        request_id=request.state.request_id,
        n=body.sequences,
        sampling=body.sampling,
        stop=body.stops,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=body.ignore_eos,
        token_ids=bool(body.return_token_ids),
        schema=body.enforced_schema,
        capture=body.recorded,
        interventions=tuple(body.interventions or ()),
        variants=tuple(map(tuple, body.variants or ())),
        logit_lens=body.logit_lens,
        readouts=tuple(body.readouts or ()),
        stop_when=body.stop_when,
        report=body.report,
        preset=preset.name if preset else None,
        preset_fields=frozenset(used.keys() - {"interventions"}),
        preset_interventions=len(used.get("interventions") or ()),
        preset_account=preset.account if preset else who,
        session_id=body.session_id or f"auto-{datetime.now(UTC):%Y-%m-%d}",
        **own,
    )


async def _answer(answer: Answer, body: Generation, job: Job, backend: Backend, used: Usage) -> Response:
    headers = used.admit(job.account.owner) | ({PRESET: job.preset} if job.preset else {})
    model = await backend.models.find(body.model)
    async with contextlib.AsyncExitStack() as ending:
        ending.callback(lambda: used.charge(job.account.owner, *answer.spent))
        if not body.stream:
            return JSONResponse(answer.whole(await model.complete(job, backend.restarted)), headers=headers)
        # On any error, and on cancellation, closing it ends the replica's work.
        gathered = await ending.enter_async_context(contextlib.aclosing(model.stream(job, backend.restarted)))
        first = await anext(gathered)  # a refusal can still set the HTTP status
        for message in first:
            if isinstance(message, Refusal):
                raise ApiError.of(message)
        usage = body.stream_options is not None and body.stream_options.include_usage
        events = _until_gone(answer.stream(gathered, first, usage, job.request_id), ending.pop_all())
        return StreamingResponse(
            events, media_type="text/event-stream", headers=headers | {"Cache-Control": "no-cache"}
        )


async def _until_gone(events: AsyncIterator[str], ending: contextlib.AsyncExitStack) -> AsyncIterator[str]:
    """Pass events on; when the client disconnects, close the job's stream, which frees its memory at once."""
    async with ending:
        async for event in events:
            yield event
