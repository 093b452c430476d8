"""The HTTP application: every route, and the whole composition in `build_api`."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Path, Query, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from pydantic import BaseModel

from deployments.activations.facts import check_session_id
from deployments.errors import RequestError
from deployments.messages import Job, Message
from serve_app.answers import Answer, Kind
from serve_app.backend import Backend
from serve_app.errors import install
from serve_app.middleware import Gate
from serve_app.schemas import ChatRequest, CompletionRequest, Generation


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """OpenAI's error body, of every failure."""

    error: ErrorDetail


def _backend(request: Request) -> Backend:
    backend: Backend = request.app.state.backend
    return backend


def _session_id(session_id: Annotated[str, Path()]) -> str:
    try:
        return check_session_id(session_id)
    except ValueError as error:
        raise RequestError(str(error), "session_id") from error


Actors = Annotated[Backend, Depends(_backend)]
SessionId = Annotated[str, Depends(_session_id)]

openai = APIRouter(tags=["OpenAI"])
activations = APIRouter(prefix="/v1/activations", tags=["Activations"])
server = APIRouter(tags=["Server"])


@openai.post("/v1/chat/completions")
async def chat(body: ChatRequest, request: Request, backend: Actors) -> Response:
    """Answer a chat, streamed or whole; record activations where `capture` or `store_activations` asks."""
    limit, name = body.limit
    job = _job(
        body,
        request,
        messages=[message.spoken for message in body.messages],
        tools=body.callable_tools,
        logprobs=body.likeliest,
        max_tokens=limit,
        fields={"prompt": "messages", "max_tokens": name},
    )
    return await _answer("chat", body, job, backend, prompts=1)


@openai.post("/v1/completions")
async def completions(body: CompletionRequest, request: Request, backend: Actors) -> Response:
    """Continue one prompt or many, streamed or whole; record activations where asked."""
    job = _job(body, request, prompts=body.prompts, max_tokens=body.max_tokens, logprobs=body.logprobs)
    return await _answer("completion", body, job, backend, prompts=len(body.prompts))


@openai.get("/v1/models")
async def models(backend: Actors) -> dict[str, Any]:
    """The models that are served."""
    return {"object": "list", "data": await backend.models()}


@openai.get("/v1/models/{model_id:path}")
async def model(model_id: str, backend: Actors) -> dict[str, Any]:
    """One model; its id may hold slashes."""
    return await backend.model(model_id)


@activations.get("/sessions")
async def sessions(
    backend: Actors, limit: Annotated[int, Query(ge=1, le=1000)] = 100, after: str | None = None
) -> dict[str, Any]:
    """Sessions of stored activations in the order of their ids, `limit` of them, behind the id `after`."""
    found = await backend.sessions(limit + 1, after)
    return {"object": "list", "data": found[:limit], "has_more": len(found) > limit}


@activations.get("/session/{session_id}")
async def session(session_id: SessionId, backend: Actors) -> dict[str, Any]:
    """One session: its runs, points, shapes and files."""
    return await backend.session(session_id)


@activations.delete("/session/{session_id}")
async def delete_session(session_id: SessionId, backend: Actors) -> dict[str, Any]:
    """Delete a session; its files are gone when this answers."""
    await backend.delete_session(session_id)
    return {"id": session_id, "object": "session", "deleted": True}


@server.get("/health")
async def health(backend: Actors) -> Response:
    """200 while every model has a replica that can serve, else 503."""
    healthy, body = await backend.health()
    return JSONResponse(body, 200 if healthy else 503, None if healthy else {"Retry-After": "1"})


@server.get("/metrics", response_class=PlainTextResponse)
async def metrics(backend: Actors) -> str:
    """What Ray exports of this project and of Serve, of all nodes, as Prometheus text."""
    return await backend.metrics()


def _job(body: Generation, request: Request, **own: Any) -> Job:
    return Job(
        id=request.state.request_id,
        n=body.choices,
        sampling=body.sampling,
        stop=body.stops,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=body.ignore_eos,
        capture=body.capturing,
        session_id=body.session_id or f"auto-{datetime.now(UTC):%Y-%m-%d}",
        **own,
    )


async def _answer(kind: Kind, body: Generation, job: Job, backend: Backend, prompts: int) -> Response:
    backend.check_model(body.model)
    answer = Answer(kind, job.id, body.model, prompts * body.choices, body.choices)
    if not body.stream:
        return JSONResponse(answer.whole(await backend.complete(job)))
    usage = body.stream_options is not None and body.stream_options.include_usage
    gathered = backend.stream(job)
    try:
        first = await anext(gathered)  # a refusal still has its own HTTP status
        answer.refuse(first)
    except BaseException:
        await gathered.aclose()
        raise
    events = _until_gone(answer.stream(gathered, first, usage), gathered)
    return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


async def _until_gone(events: AsyncIterator[str], gathered: AsyncGenerator[list[Message]]) -> AsyncIterator[str]:
    """Pass on events; close the job's stream with the client's, so that its slot is freed at once."""
    async with contextlib.aclosing(gathered):
        async for event in events:
            yield event


def build_api(backend: Backend, max_body_bytes: int) -> FastAPI:
    """The whole application.

    Args:
        backend: The actors it asks.
        max_body_bytes: The largest body it reads.
    """
    api = FastAPI(
        title="Vitrine",
        description="Hugging Face language models behind the OpenAI API, with their internals open.",
        responses={code: {"model": ErrorBody} for code in (400, 404, 413, 429, 500, 503, 504)},
    )
    api.state.backend = backend
    api.add_middleware(Gate, max_body_bytes=max_body_bytes)
    install(api)
    for router in (openai, activations, server):
        api.include_router(router)
    return api
