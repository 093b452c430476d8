"""Chats and completions."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Body, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

import serve_app.openapi_examples as examples
from deployments.accounts import Account
from deployments.errors import RequestError
from deployments.job import Job
from deployments.messages import Message, Refusal
from deployments.points.capture import Capture
from serve_app.answers import Answer, Kind
from serve_app.backend.backend import Backend
from serve_app.http.bodies import JsonRoute
from serve_app.http.errors import ApiError
from serve_app.openapi import errors
from serve_app.routes.dependencies import AppBackend, CallerAccount
from serve_app.routes.headers import ByHeaders, Named
from serve_app.schemas.generation import ChatRequest, CompletionRequest, Generation

PROFILE = "X-Intervention-Profile"  # of an answer: the profile that was used, which may be a default


openai = APIRouter(tags=["OpenAI"], responses=errors(503), route_class=JsonRoute)


GENERATION = examples.IS_ARCHIVED | errors(404, 429, 504)


@openai.post("/v1/chat/completions", responses=examples.CHAT | GENERATION)
async def chat(
    body: Annotated[ChatRequest, Body(openapi_examples=examples.CHAT_EXAMPLES)],
    request: Request,
    backend: AppBackend,
    who: CallerAccount,
    named: ByHeaders,
) -> Response:
    """Answer a chat, streamed or whole, and record activations if `capture` or `store_activations` asks for it."""
    limit, name = body.limit
    job = await _job(
        body,
        request,
        backend,
        who,
        named,
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
    named: ByHeaders,
) -> Response:
    """Continue one prompt or several, streamed or whole, and record activations if the request asks for it."""
    job = await _job(
        body,
        request,
        backend,
        who,
        named,
        prompts=body.prompts,
        max_tokens=body.max_tokens,
        logprobs=body.logprobs,
        echo=bool(body.echo),
        ranked=body.sequences > body.choices,
    )
    return await _answer("completion", body, job, backend, prompts=len(body.prompts))


async def _job(
    body: Generation, request: Request, backend: Backend, who: Account, by_headers: Named, **own: Any
) -> Job:
    storing = body.store_activations
    if storing is None and by_headers.tags is not None:  # a request with tags is recorded
        storing = True
    job = Job(
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
        capture=body.capture or (Capture() if storing else None),
        interventions=tuple(body.interventions or ()),
        variants=tuple(map(tuple, body.variants or ())),
        logit_lens=body.logit_lens,
        readouts=tuple(body.readouts or ()),
        stop_when=body.stop_when,
        report=body.report,
        session_id=body.session_id or by_headers.session_id or f"auto-{datetime.now(UTC):%Y-%m-%d}",
        **own,
    )
    job = await backend.profiles.applied(job, body.intervention_profile, body.model, body.capture, storing)
    if job.capture is None and storing is not False and any(one.store for one in job.readouts):
        job = replace(job, capture=Capture.model_construct(points=[]))  # without points: only readouts are recorded
    job = by_headers.tagged(job)
    if job.capture and body.sequences > body.choices:
        message = (
            "with a profile that records, best_of must equal n, because sequences that are not "
            "returned would be recorded, too"
        )
        raise RequestError(message, "best_of")
    return job


async def _answer(kind: Kind, body: Generation, job: Job, backend: Backend, prompts: int) -> Response:
    model = await backend.models.find(body.model)
    answer = Answer(kind, job.id, body.model, prompts * body.sequences, body.sequences, body.choices)
    headers = {PROFILE: job.profile} if job.profile else {}
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
