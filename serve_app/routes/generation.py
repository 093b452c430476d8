"""Chats and completions."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from datetime import UTC, datetime
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Body, Depends, Header, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import ValidationError

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
from serve_app.schemas.presets import merged

PRESET = "X-Vitrine-Preset"  # of a request: the preset to use; of an answer: the one that was used
FIELDS = "X-Vitrine-Body"

G = TypeVar("G", bound=Generation)


class GenerationRoute(JsonRoute):
    """A route whose body may be completed by headers, for clients whose bodies cannot be changed."""

    @staticmethod
    def completed(body: Any, request: Request) -> Any:
        """The body's value with the fields of headers below its own."""
        preset, fields = request.headers.get(PRESET), request.headers.get(FIELDS)
        below = ({} if preset is None else {"preset": preset}) | (
            {} if fields is None else json_object(fields.encode("latin-1"), FIELDS)
        )
        return merged(below, body) if below and isinstance(body, dict) else body


async def _fields(
    preset: Annotated[str | None, Header(alias=PRESET, max_length=256, description="The field `preset`.")] = None,
    fields: Annotated[
        str | None,
        Header(alias=FIELDS, max_length=1 << 15, description="A JSON object of fields; those of the body override it."),
    ] = None,
) -> None:
    """Documents the headers, and limits them; `GenerationRoute` reads them."""


openai = APIRouter(tags=["OpenAI"], responses=errors(503), route_class=GenerationRoute, dependencies=[Depends(_fields)])


GENERATION = examples.IS_ARCHIVED | errors(404, 429, 504)


@openai.post("/v1/chat/completions", responses=examples.CHAT | GENERATION)
async def chat(
    body: Annotated[ChatRequest, Body(openapi_examples=examples.CHAT_EXAMPLES)],
    request: Request,
    backend: AppBackend,
    who: CallerAccount,
) -> Response:
    """Answer a chat, streamed or whole, and record activations if `capture` or `store_activations` asks for it."""
    body, preset = await _merged(body, request, backend, who)
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
        template_kwargs=body.chat_template_kwargs or {},
        logprobs=body.likeliest,
        max_tokens=limit,
        fields={"prompt": "messages", "max_tokens": name},
    )
    return await _answer("chat", body, job, backend, prompts=1)


@openai.post("/v1/completions", responses=examples.COMPLETION | GENERATION)
async def completions(
    body: Annotated[CompletionRequest, Body(openapi_examples=examples.COMPLETION_EXAMPLES)],
    request: Request,
    backend: AppBackend,
    who: CallerAccount,
) -> Response:
    """Continue one prompt or several, streamed or whole, and record activations if the request asks for it."""
    body, preset = await _merged(body, request, backend, who)
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


async def _merged(body: G, request: Request, backend: Backend, who: Account) -> tuple[G, ChosenPreset | None]:
    """The body with the fields that its preset adds, and the preset."""
    preset = await backend.presets.chosen(who, body.preset or body.intervention_profile, body.model)
    if preset is None:
        return body, None
    fields = merged(preset.fields, await request.json(), preset.by_default)
    try:
        whole = type(body).model_validate(fields)
    except ValidationError as found:
        error = invalid([{**one, "loc": ("body", *one["loc"])} for one in found.errors(include_url=False)])
        message = f"with the preset {preset.name!r}: {error.message}"
        raise ApiError(error.status, message, error.param, error.code) from None
    own = {name for name in body.model_fields_set if getattr(body, name) is not None}
    added = {name: value for name, value in preset.fields.items() if name == "interventions" or name not in own}
    return whole, preset._replace(fields=added)


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
