"""Chats and completions."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, Header, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse

import serve_app.openapi_examples as examples
from deployments.accounts import Account
from deployments.job import Job
from deployments.messages import Message, Refusal
from serve_app.answers import Answer, Kind
from serve_app.backend.backend import Backend
from serve_app.backend.preset_registry import ChosenPreset
from serve_app.http.bodies import JsonRoute, json_object
from serve_app.http.errors import ApiError, invalid
from serve_app.openapi import errors
from serve_app.routes.dependencies import AppBackend, CallerAccount
from serve_app.schemas.generation import ChatRequest, CompletionRequest, Generation
from serve_app.schemas.presets import PRESET_NAME, merged

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
    whole = merged(below, body) if below else dict(body)
    chosen: ChosenPreset | None = None
    model = whole.get("model")
    name = whole.get("preset") or whole.get("intervention_profile")
    if isinstance(model, str) and (name is None or (isinstance(name, str) and PRESET_NAME.fullmatch(name))):
        chosen = await backend.presets.chosen(who, name, model)
    if chosen is not None:
        request.state.own, request.state.preset = whole, chosen.name
        own = {field for field, value in whole.items() if value is not None} - {"interventions"}
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
    limit, name = body.limit
    job = _job(
        body,
        request,
        who,
        preset,
        messages=[message.spoken for message in body.messages],
        tools=body.callable_tools,
        must_call=body.must_call,
        parallel_calls=body.parallel_calls,
        tool_call_format=body.tool_call_format,
        template_kwargs=body.chat_template_kwargs or {},
        ending=body.ending,
        logprobs=body.likeliest,
        max_tokens=limit,
        fields={"prompt": "messages", "max_tokens": name},
    )
    return await _answer("chat", body, job, backend, prompts=1)


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
    return await _answer("completion", body, job, backend, prompts=len(body.prompts))


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


async def _answer(kind: Kind, body: Generation, job: Job, backend: Backend, prompts: int) -> Response:
    model = await backend.models.find(body.model)
    answer = Answer(kind, job.id, body.model, prompts * body.sequences, body.sequences, body.choices)
    headers = {PRESET: job.preset} if job.preset else {}
    if not body.stream:
        return JSONResponse(answer.whole(await model.complete(job, backend.restarted)), headers=headers)
    usage = body.stream_options is not None and body.stream_options.include_usage
    gathered = model.stream(job, backend.restarted)
    try:
        first = await anext(gathered)  # a refusal can still set the HTTP status
        for message in first:
            if isinstance(message, Refusal):
                raise ApiError.of(message)
    except BaseException:  # also on cancellation: end the replica's work, then re-raise
        await gathered.aclose()
        raise
    events = _until_gone(answer.stream(gathered, first, usage, job.request_id), gathered)
    return StreamingResponse(events, media_type="text/event-stream", headers=headers | {"Cache-Control": "no-cache"})


async def _until_gone(events: AsyncIterator[str], gathered: AsyncGenerator[list[Message]]) -> AsyncIterator[str]:
    """Pass events on; when the client disconnects, close the job's stream, which frees its memory at once."""
    async with contextlib.aclosing(gathered):
        async for event in events:
            yield event
