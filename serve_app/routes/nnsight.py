"""nnsight's remote protocol: clients' code on the served models, if the operator allows it.

A client opens a socket, receives the listener's name, posts its block with that name, and receives the job's status on
the socket. Or it posts without a socket and polls by the job's id. The messages are nnsight's `RequestModel` and
`ResponseModel`.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import re
import sys
from functools import cache
from typing import Annotated, Any

from fastapi import APIRouter, Depends, File, Form, Path, Query, UploadFile, WebSocket
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response, StreamingResponse
from pydantic import ConfigDict, Field, ValidationError
from starlette.requests import HTTPConnection
from starlette.websockets import WebSocketDisconnect

import serve_app.openapi_examples as examples
from deployments.accounts import Account
from deployments.client_code.job import ModelKey, Update
from deployments.errors import RequestError
from deployments.points.strict import Strict
from serve_app.backend.code_jobs import CodeJobs
from serve_app.http.errors import NNSIGHT, ApiError
from serve_app.http.guard import Sender
from serve_app.http.middleware import BYTES
from serve_app.http.uploads import UploadRoute
from serve_app.openapi import errors
from serve_app.routes.dependencies import AppBackend, CallerAccount
from serve_app.schemas.base import Name, free_json

CODE_DISABLED = "This server does not run client code; the operator can set allow_client_code=true"


class Envelope(Strict):
    """The form's field `data`: nnsight's `RequestModel`."""

    model_config = ConfigDict(frozen=True)

    model_key: str = Field(max_length=8192)
    session_id: str = Field(default="", max_length=64)
    compress: bool = False
    env: Annotated[dict[Name, Any], Field(max_length=16), free_json()] = Field(default_factory=dict)


def _off() -> ApiError:
    return ApiError(403, CODE_DISABLED, None, "client_code_off")


def _not_code() -> ApiError:
    message = "this key may not run client code: use a key with the role code or admin"
    return ApiError(403, message, None, "insufficient_permissions")


async def _jobs(backend: AppBackend) -> CodeJobs:
    if backend.jobs is None:
        raise _off()
    return backend.jobs


async def _is_nnsight(connection: HTTPConnection) -> None:
    if NNSIGHT.decode() not in connection.headers:  # pages of other origins cannot send it without a preflight
        raise RequestError("the form has no version: send the request with nnsight's client", NNSIGHT.decode())


async def _runs_code(sender: Sender) -> None:
    if not sender.may_run_code:
        raise _not_code()


JobId = Annotated[str, Path(max_length=64)]
Jobs = Annotated[CodeJobs, Depends(_jobs)]
CodeOnly = Depends(_runs_code)
router = APIRouter(tags=["nnsight"], responses=errors(403, 503), route_class=UploadRoute)
sockets = APIRouter()


@router.post("/request", dependencies=[CodeOnly, Depends(_is_nnsight)], responses=examples.JOB | errors(404, 429))
async def request(
    data: Annotated[str, Form(max_length=1 << 16)], blob: Annotated[UploadFile, File()], jobs: Jobs, who: CallerAccount
) -> dict[str, Any]:
    """Take a client's block. Its status comes on the socket of its `session_id`, or from `/response/{id}`."""
    try:
        envelope = Envelope.model_validate_json(data)
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)
        raise RequestValidationError([item | {"loc": ("body", "data", *item["loc"])} for item in details]) from error
    key = ModelKey.parse(envelope.model_key)
    sent = await jobs.send(key, await blob.read(), envelope.compress, envelope.env, envelope.session_id, who.owner)
    return sent.as_json


@router.get("/response/{job_id}", dependencies=[CodeOnly], responses=examples.JOB | errors(410))
async def response(job_id: JobId, connection: HTTPConnection, jobs: Jobs, who: CallerAccount) -> dict[str, Any]:
    """Show a job's last status; when it is done, `data` is the address of its result."""
    return await jobs.status(who, job_id, _address(connection))


@router.get("/response/{job_id}/result", response_class=Response, responses=examples.RESULT | errors(404))
async def result(job_id: JobId, token: Annotated[str, Query(max_length=256)], jobs: Jobs) -> Response:
    """Download a finished job's saved values for `torch.load`, compressed if the job was; the token authorizes it."""
    length, pieces = await jobs.result(job_id, token)
    # nnsight's clients use no ranges. A client that closes the connection after the result has received it.
    headers = {"Content-Length": str(length), "Connection": "close"}
    return StreamingResponse(pieces, media_type=BYTES, headers=headers)


@router.get("/status", responses=examples.STATUS)
async def status(backend: AppBackend, jobs: Jobs) -> dict[str, Any]:
    """List the models that can run nnsight code, as `nnsight.status()` reads them."""
    await backend.models.refresh()
    return {"deployments": {model.id: await model.deployment() for model in backend.models.loaded}}


@router.get("/env", responses=examples.ENVIRONMENT)
async def env(jobs: Jobs) -> dict[str, Any]:
    """List the server's Python and packages by their import names, as `nnsight.compare()` reads them."""
    return await asyncio.to_thread(_environment)


@router.get("/whoami", responses=examples.WHOAMI)
async def whoami(connection: HTTPConnection, jobs: Jobs) -> dict[str, Any]:
    """Show the key's role; the server has no personal accounts."""
    return {"email": None, "tags": [connection.state.caller.role]}


@sockets.websocket("/subscribe")
async def subscribe(socket: WebSocket, backend: AppBackend, who: CallerAccount) -> None:
    """Send a listener its name, then each status of its jobs; stop the jobs when it disconnects."""
    if backend.jobs is None:
        return await _off().close(socket)
    if not socket.state.caller.may_run_code:
        return await _not_code().close(socket)
    jobs = backend.jobs
    listener = await jobs.listen(who.owner)
    tasks: list[asyncio.Task[None]] = []
    try:
        await socket.accept()
        await socket.send_json({"session_id": listener})
        for part in (_until_gone(socket), _pass_on(socket, jobs, who, listener), jobs.stay(listener)):
            tasks.append(asyncio.ensure_future(part))
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()
    except WebSocketDisconnect:
        pass  # between two messages
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await jobs.leave(listener)


async def _until_gone(socket: WebSocket) -> None:
    while (await socket.receive())["type"] != "websocket.disconnect":
        pass  # nnsight's clients send nothing


async def _pass_on(socket: WebSocket, jobs: CodeJobs, who: Account, listener: str) -> None:
    while True:
        for update in await jobs.updates(listener):
            await _tell(socket, jobs, who, update)


async def _tell(socket: WebSocket, jobs: CodeJobs, who: Account, update: Update) -> None:
    if update.frame is not None:
        await socket.send_bytes(update.frame)
    elif update.status == "COMPLETED":
        await socket.send_json(await jobs.status(who, update.id, _address(socket)))
    else:
        await socket.send_json(update.as_json)


def _address(connection: HTTPConnection) -> str:
    """The server's address as the client reaches it, for HTTP."""
    return re.sub("^ws", "http", str(connection.base_url))


@cache
def _environment() -> dict[str, Any]:
    imported: dict[str, list[str]] = {}
    for name, distributions in importlib.metadata.packages_distributions().items():
        for distribution in distributions:
            imported.setdefault(distribution, []).append(name)
    packages = {
        name: installed.version
        for installed in importlib.metadata.distributions()
        for name in imported.get(installed.metadata["Name"], [installed.metadata["Name"]])
    }
    return {"python_version": sys.version, "packages": packages}
