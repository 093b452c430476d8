"""The HTTP application: every route, and the whole composition in `build_api`."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, Depends, FastAPI, Path, Query, Request, Security
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

import serve_app.described as described
import serve_app.documentation as documentation
import serve_app.page_files as page_files
import serve_app.remote as remote
from deployments import __version__
from deployments.activations.accounts import Account
from deployments.activations.downloads import Choice
from deployments.activations.facts import check_session_id
from deployments.activations.filters import Filter, tag_pairs
from deployments.errors import RequestError
from deployments.messages import Job, Message
from deployments.options import Options
from serve_app.answers import Answer, Kind
from serve_app.backend import Backend
from serve_app.bodies import Bodies, JsonRoute
from serve_app.dependencies import Actors, Who, known_query
from serve_app.described import Described, errors
from serve_app.errors import HEADERS, install
from serve_app.guard import BEARER, AdminOnly, Guard
from serve_app.keys import Keys
from serve_app.listing import fitting
from serve_app.middleware import BYTES, TENSORS, BodyLimits, RequestIds
from serve_app.ranges import Ranged, page
from serve_app.schemas import ChatRequest, CompletionRequest, Generation, ProfileBody
from serve_app.token_schemas import DetokenizeRequest, TokenizeRequest
from serve_app.wire_models import LoadRequest, UnloadRequest

FINITE: dict[str, Any] = {"allow_inf_nan": False}
MOST_TAGS = 32  # of a filter: SQLite's expressions may be 1,000 deep
MOST_NAMES = 1000  # of runs, or of points, of one request
Id = Annotated[str, Query(max_length=256)]
Names = Annotated[str, Query(max_length=1 << 16)]  # apart by commas
PathId = Annotated[str, Path(max_length=256)]
PROFILE = "X-Intervention-Profile"  # of an answer: the profile that it used, which the request need not have named


# Coroutines, though they wait for nothing: FastAPI runs plain functions on a thread of their own.
async def _session_id(session_id: PathId) -> str:
    return _checked(session_id, "session_id")


async def _filter(
    model: Annotated[Id | None, Query(description="Runs of this model alone.")] = None,
    since: Annotated[float | None, Query(description="Created then or later, in Unix seconds.", **FINITE)] = None,
    until: Annotated[float | None, Query(description="Created before, in Unix seconds.", **FINITE)] = None,
    sample_id: Annotated[Id | None, Query(description="Runs of this sample alone.")] = None,
    tag: Annotated[
        list[Annotated[str, Query(max_length=513)]] | None,
        Query(description="`name=value`; where repeated, all must hold.", max_length=MOST_TAGS),
    ] = None,
    run: Annotated[
        list[Names] | None,
        Query(description="These runs alone: ids, repeated or apart by commas.", max_length=MOST_NAMES),
    ] = None,
) -> Filter:
    runs = _apart(run, "run")
    try:
        return Filter(None, model, since, until, sample_id, tag_pairs(tag or ()), runs=runs)
    except ValueError as error:
        raise RequestError(str(error), "tag") from error


DataFormat = Literal["arrow", "safetensors", "npz", "pt"]
SessionId = Annotated[str, Depends(_session_id)]
Filtered = Annotated[Filter, Depends(_filter)]
Owner = Annotated[Id | None, Query(description="For an admin: whose it is.")]

openai = APIRouter(tags=["OpenAI"], responses=errors(503), route_class=JsonRoute)
tokens = APIRouter(tags=["Tokens"], responses=errors(404, 429, 503, 504), route_class=JsonRoute)
models = APIRouter(
    prefix="/models",
    tags=["Models"],
    dependencies=[AdminOnly],
    responses=errors(403, 404, 503, 504),
    route_class=JsonRoute,
)
activations = APIRouter(prefix="/v1/activations", tags=["Activations"], responses=errors(503))
explored = APIRouter(prefix="/v1/model", tags=["Models"], responses=errors(404, 503, 504))
tensors = APIRouter(prefix=TENSORS, tags=["Tensors"], responses=errors(503))
profiles = APIRouter(prefix="/v1/interventions", tags=["Profiles"], responses=errors(503), route_class=JsonRoute)
server = APIRouter(tags=["Server"], responses=errors(503))
open_to_all = APIRouter(tags=["Server"])
GENERATION = described.IS_GONE | errors(403, 404, 429, 504)


@openai.post("/v1/chat/completions", responses=described.CHAT | GENERATION)
async def chat(
    body: Annotated[ChatRequest, Body(openapi_examples=described.CHAT_EXAMPLES)],
    request: Request,
    backend: Actors,
    who: Who,
) -> Response:
    """Answer a chat, streamed or whole; record activations where `capture` or `store_activations` asks."""
    limit, name = body.limit
    job = await _job(
        body,
        request,
        backend,
        who,
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


@openai.post("/v1/completions", responses=described.COMPLETION | GENERATION)
async def completions(
    body: Annotated[CompletionRequest, Body(openapi_examples=described.COMPLETION_EXAMPLES)],
    request: Request,
    backend: Actors,
    who: Who,
) -> Response:
    """Continue one prompt or many, streamed or whole; record activations where asked."""
    job = await _job(
        body,
        request,
        backend,
        who,
        prompts=body.prompts,
        max_tokens=body.max_tokens,
        logprobs=body.logprobs,
        echo=bool(body.echo),
        ranked=body.sequences > body.choices,
    )
    return await _answer("completion", body, job, backend, prompts=len(body.prompts))


@tokens.post("/tokenize", responses=described.TOKENS)
async def tokenize(body: TokenizeRequest, backend: Actors) -> dict[str, Any]:
    """The tokens of a prompt, or of a chat as the model's template writes it."""
    model = await backend.models.find(body.model)
    return await model.tokenize(body.text)


@tokens.post("/detokenize", responses=described.TEXT)
async def detokenize(body: DetokenizeRequest, backend: Actors) -> dict[str, Any]:
    """The text of tokens, and with `return_token_strs` of each of them."""
    model = await backend.models.find(body.model)
    return await model.detokenize(body.tokens, bool(body.return_token_strs))


@openai.get("/v1/models", responses=described.MODELS)
async def list_models(backend: Actors) -> dict[str, Any]:
    """The models that are served."""
    return {"object": "list", "data": await backend.models.describe()}


@openai.get("/v1/models/{model_id:path}", responses=described.MODEL | errors(404, 504))
async def retrieve_model(model_id: PathId, backend: Actors) -> dict[str, Any]:
    """One model; its id may hold slashes."""
    model = await backend.models.find(model_id)
    return await model.describe()


@explored.get("/structure", responses=described.STRUCTURE)
async def model_structure(backend: Actors, model: Id | None = None) -> dict[str, Any]:
    """What a model is made of: its sizes, every capture point and its modules."""
    found = await backend.models.find(model)
    return await found.structure()


@models.post("/load", responses=described.LOADED | errors(409, 429))
async def load_model(body: LoadRequest, backend: Actors) -> dict[str, Any]:
    """Load a model beside the others; answers when it serves, at once where it does already."""
    return await backend.loader.load(body)


@models.post("/unload", responses=described.UNLOADED | errors(409, 429))
async def unload_model(body: UnloadRequest, backend: Actors) -> dict[str, Any]:
    """Finish what runs on a model, then let it go; answers when nothing of it is left."""
    return await backend.loader.unload(body.model_id)


@activations.get("/sessions", responses=described.SESSIONS)
async def sessions(
    backend: Actors,
    who: Who,
    filter: Filtered,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    after: Id | None = None,
) -> dict[str, Any]:
    """Sessions of stored activations in the order of their ids, `limit` of them, behind the id `after`.

    With filters, those that hold a run which fits all of them, and the numbers count such runs alone.
    """
    return _page(await backend.sessions(who, limit + 1, after, filter), limit)


@activations.get("/runs", responses=described.RUNS)
async def runs(
    backend: Actors,
    who: Who,
    filter: Filtered,
    session: Id | None = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    after: Id | None = None,
) -> dict[str, Any]:
    """Stored runs of all sessions that fit all filters, the oldest first, `limit` of them, behind the run `after`."""
    if session is not None:
        filter = filter._replace(session=_checked(session, "session"))
    return _page(await backend.runs(who, filter, limit + 1, after), limit)


@activations.get("/session/{session_id}", responses=described.SESSION | errors(404))
async def session(
    session_id: SessionId,
    backend: Actors,
    who: Who,
    limit: Annotated[int, Query(ge=1, le=1000, description="Of its runs.")] = 100,
    after: Annotated[Id | None, Query(description="The run behind which they begin.")] = None,
) -> dict[str, Any]:
    """One session: its runs, the oldest first, their points and shapes, and its files."""
    return await backend.session(who, session_id, limit, after)


@activations.head("/session/{session_id}/data", include_in_schema=False)
@activations.get(
    "/session/{session_id}/data",
    response_class=Response,
    responses=described.DATA | described.IS_GONE | errors(404, 429),
)
async def session_data(
    session_id: SessionId,
    backend: Actors,
    who: Who,
    asked: Ranged,
    run: Annotated[
        list[Names] | None,
        Query(description="Ids of runs, repeated or apart by commas; all by default.", max_length=MOST_NAMES),
    ] = None,
    points: Annotated[
        list[Names] | None, Query(description="Names of points, likewise; all by default.", max_length=MOST_NAMES)
    ] = None,
    format: DataFormat = "arrow",
) -> Response:
    """Download stored runs page by page: an Arrow IPC stream, or a file of named tensors."""
    data = await backend.data(who, Choice(session_id, _apart(run, "run"), _apart(points, "points"), format), asked.tag)
    name = f"{session_id}.{'arrows' if format == 'arrow' else format}"
    kind = described.ARROW if format == "arrow" else BYTES
    return await page(asked, data, kind, {"Content-Disposition": f'attachment; filename="{name}"'})


@activations.delete("/session/{session_id}", responses=described.DELETED | described.IS_PINNED | errors(404))
async def delete_session(session_id: SessionId, backend: Actors, who: Who, answer: Response) -> dict[str, Any]:
    """Delete a session that is not pinned; its files are gone when this answers 200.

    It is listed no more in any case. With 202, nodes that are away delete their part of it when they come back.
    """
    deleted = {"id": session_id, "object": "session", "deleted": True}
    if away := await backend.delete_session(who, session_id):
        answer.status_code = 202
        return {**deleted, "deleted": False, "waits_for": away}
    return deleted


@activations.put("/session/{session_id}/pin", responses=described.PINNED | errors(404))
async def pin_session(session_id: SessionId, backend: Actors, who: Who) -> dict[str, Any]:
    """Pin a session: neither a request nor a limit of the store deletes it."""
    await backend.pin_session(who, session_id, True)
    return {"id": session_id, "object": "session", "pinned": True}


@activations.delete("/session/{session_id}/pin", responses=described.UNPINNED | errors(404))
async def unpin_session(session_id: SessionId, backend: Actors, who: Who) -> dict[str, Any]:
    """Take a session's pin away; one that has none stays as it is."""
    await backend.pin_session(who, session_id, False)
    return {"id": session_id, "object": "session", "pinned": False}


@activations.put("/session/{session_id}/shared", responses=described.SHARED | errors(404))
async def share_session(session_id: SessionId, backend: Actors, who: Who) -> dict[str, Any]:
    """Let every key list, read and download a session; to change it stays its owner's."""
    await backend.share_session(who, session_id, True)
    return {"id": session_id, "object": "session", "shared": True}


@activations.delete("/session/{session_id}/shared", responses=described.UNSHARED | errors(404))
async def unshare_session(session_id: SessionId, backend: Actors, who: Who) -> dict[str, Any]:
    """Let its owner and admins alone read a session again."""
    await backend.share_session(who, session_id, False)
    return {"id": session_id, "object": "session", "shared": False}


@tensors.post("", responses=described.TENSORS)
async def upload_tensors(data: Annotated[bytes, Body(media_type=BYTES)], backend: Actors, who: Who) -> dict[str, Any]:
    """Keep one safetensors file, of steering vectors or probe directions; the same bytes again have the same id."""
    return await backend.put_tensors(who, data)


@tensors.get("", responses=described.TENSOR_FILES)
async def tensor_files(
    backend: Actors, who: Who, limit: Annotated[int, Query(ge=1, le=1000)] = 100, after: Id | None = None
) -> dict[str, Any]:
    """Tensor files in the order of their ids, `limit` of them, behind the id `after`."""
    return _page(await backend.tensor_files(who, limit + 1, after), limit)


@tensors.head("/{tensor_id}", include_in_schema=False)
@tensors.get("/{tensor_id}", response_class=Response, responses=described.TENSOR_FILE | errors(404))
async def tensor_file(tensor_id: PathId, backend: Actors, who: Who, asked: Ranged) -> Response:
    """A tensor file page by page, as it was sent."""
    return await page(asked, await backend.tensor_file(who, tensor_id), BYTES)


@tensors.delete("/{tensor_id}", responses=described.TENSORS_DELETED | errors(404))
async def delete_tensors(tensor_id: PathId, backend: Actors, who: Who) -> dict[str, Any]:
    """Delete a tensor file; it is gone when this answers."""
    await backend.delete_tensors(who, tensor_id)
    return {"id": tensor_id, "object": "tensors", "deleted": True}


@profiles.post("", responses=described.PROFILE | errors(403, 429, 504))
async def keep_profile(body: ProfileBody, backend: Actors, who: Who) -> dict[str, Any]:
    """Keep a profile, in the place of one's own of its name; to make a default, or change one, takes an admin."""
    return await backend.keep_profile(who, body)


@profiles.get("", responses=described.PROFILES)
async def list_profiles(
    backend: Actors, who: Who, limit: Annotated[int, Query(ge=1, le=1000)] = 100, after: Id | None = None
) -> dict[str, Any]:
    """Profiles in the order of their names, `limit` of them, behind the name `after`; without what they do.

    To an admin everybody's: `after` is `name@owner` then.
    """
    return _page(await backend.profiles.list(who, limit + 1, after), limit)


@profiles.get("/{name}", responses=described.PROFILE | errors(404))
async def retrieve_profile(name: PathId, backend: Actors, who: Who, owner: Owner = None) -> dict[str, Any]:
    """A profile, as it was sent: the sender's own, else a default of that name."""
    return await backend.profiles.get(who, name, owner)


@profiles.delete("/{name}", responses=described.PROFILE_DELETED | errors(403, 404))
async def delete_profile(name: PathId, backend: Actors, who: Who, owner: Owner = None) -> dict[str, Any]:
    """Delete a profile; it is gone when this answers. A default takes an admin."""
    await backend.profiles.delete(who, name, owner)
    return {"name": name, "object": "intervention_profile", "deleted": True}


@open_to_all.get("/health", responses=described.HEALTH)
async def health(backend: Actors) -> Response:
    """200 while every loaded model has a replica that can serve, else 503."""
    healthy, body = await backend.models.health()
    return JSONResponse(body) if healthy else JSONResponse(body, 503, HEADERS[503])


@server.get("/metrics", response_class=Response, responses=described.METRICS)
async def metrics(backend: Actors) -> Response:
    """What Ray exports of this project and of Serve, of all nodes, as Prometheus text; at most a second old."""
    return PlainTextResponse(await backend.metrics.text())


def _checked(session_id: str, field: str) -> str:
    try:
        return check_session_id(session_id)
    except ValueError as error:
        raise RequestError(str(error), field) from error


def _apart(values: list[str] | None, field: str) -> tuple[str, ...] | None:
    """What a repeated field or commas set apart; None where the field is left out."""
    if values is None:
        return None
    parts = tuple(part for value in values for part in value.split(","))
    if not all(parts):
        raise RequestError("a name is empty: leave the field out for all", field)
    if len(parts) > MOST_NAMES:
        raise RequestError(f"{len(parts)} names are more than the {MOST_NAMES} that one request may name", field)
    return parts


def _page(found: list[dict[str, Any]], limit: int) -> dict[str, Any]:
    """A list of at most so many, of which one more was looked for."""
    some, has_more = fitting(found, limit)
    return {"object": "list", "data": some, "has_more": has_more}


async def _job(body: Generation, request: Request, backend: Backend, who: Account, **own: Any) -> Job:
    job = Job(
        id=uuid.uuid4().hex,  # what it records is named after it: a client could choose another's X-Request-Id
        account=who,
        request_id=request.state.request_id,
        n=body.sequences,
        sampling=body.sampling,
        stop=body.stops,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=body.ignore_eos,
        token_ids=bool(body.return_token_ids),
        schema=body.enforced_schema,
        capture=body.capturing,
        interventions=tuple(body.interventions or ()),
        variants=tuple(map(tuple, body.variants or ())),
        logit_lens=body.logit_lens,
        session_id=body.session_id or "-".join(filter(None, [f"auto-{datetime.now(UTC):%Y-%m-%d}", who.owner])),
        **own,
    )
    named, storing = body.intervention_profile, body.store_activations
    job = await backend.profiles.applied(job, named, body.model, body.capture, storing)
    if job.capture and body.sequences > body.choices:
        message = "what is not returned would be recorded, too: with a profile that records, it is n"
        raise RequestError(message, "best_of")
    return job


async def _answer(kind: Kind, body: Generation, job: Job, backend: Backend, prompts: int) -> Response:
    model = await backend.models.find(body.model)
    job = await backend.admitted(job)
    answer = Answer(kind, job.id, body.model, prompts * body.sequences, body.sequences, body.choices)
    headers = {PROFILE: job.profile} if job.profile else {}
    if not body.stream:
        return JSONResponse(answer.whole(await model.complete(job)), headers=headers)
    usage = body.stream_options is not None and body.stream_options.include_usage
    gathered = model.stream(job)
    try:
        first = await anext(gathered)  # a refusal still has its own HTTP status
        answer.refuse(first)
    except BaseException:
        await gathered.aclose()
        raise
    events = _until_gone(answer.stream(gathered, first, usage, job.request_id), gathered)
    return StreamingResponse(events, media_type="text/event-stream", headers=headers | {"Cache-Control": "no-cache"})


async def _until_gone(events: AsyncIterator[str], gathered: AsyncGenerator[list[Message]]) -> AsyncIterator[str]:
    """Pass on events; close the job's stream with the client's, so that its slot is freed at once."""
    async with contextlib.aclosing(gathered):
        async for event in events:
            yield event


def build_api(backend: Backend, options: Options, keys: Keys) -> FastAPI:
    """The whole application.

    Args:
        backend: The actors it asks.
        options: The operator's.
        keys: Who may ask.
    """
    api = Described(
        title="Vitrine",
        version=__version__,
        description="Hugging Face language models behind the OpenAI API, with their internals open.",
        responses=errors(400, 413, 500),
        docs_url=None,  # which would load scripts of another origin
        redoc_url=None,
    )
    api.state.backend = backend
    api.state.bodies = Bodies()
    # The last that is added comes first.
    api.add_middleware(
        BodyLimits, max_body_bytes=options.max_body_bytes, max_tensor_file_bytes=options.max_tensor_file_bytes
    )
    api.add_middleware(Guard, options=options, keys=keys)
    api.add_middleware(RequestIds)
    if options.cors_origins:  # outside of the others, so that a page can read their refusals, too
        api.add_middleware(
            CORSMiddleware,
            allow_origins=options.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After", "Accept-Ranges", "Content-Range", "ETag", PROFILE],
        )
    install(api)
    # These take any query: load balancers and browsers add what is theirs, and a socket has no body to answer with.
    api.include_router(open_to_all)
    api.include_router(documentation.router)
    if options.page:
        api.include_router(page_files.router)
    api.include_router(remote.sockets)  # the guard looks at its key, too
    for router in (openai, tokens, explored, models, activations, tensors, profiles, remote.router, server):
        if keys:
            dependencies = [Security(BEARER), Depends(known_query)]
            api.include_router(router, dependencies=dependencies, responses=errors(401))
        else:
            api.include_router(router, dependencies=[Depends(known_query)])
    return api
