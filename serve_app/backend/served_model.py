"""One served model: its phase, and calls of its replicas with time limits."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from enum import Enum
from typing import Any, cast

import grpc
import ray
from ray import serve
from ray.serve.handle import DeploymentResponseGenerator
from ray.serve.schema import ApplicationStatusOverview

from deployments.client_code.job import CodeJob, ModelKey
from deployments.job import Job, Text
from deployments.messages import ENGINE_ENDED, NOT_TAKEN, Message, Refusal
from serve_app.http.errors import ApiError

FRESH_S = 1.0  # for how long it is taken as known whether a replica runs: asking Serve takes 10 ms of processor time


DESCRIBE_S = 5.0  # the longest that one waits for what a model is, or how it was loaded


GRACE_S = 5.0  # for which a replica's own time limit comes first


MOST_REFUSED = 10  # times that one request is: the process of an ended engine has ended by then
AGAIN_S = 1.0  # before another replica gets a request that a replica with an ended engine refused


DEPLOYMENT = "ModelReplica"

# What a call raises whose replica ends; of Ray, and, since messages travel by gRPC, of that, where it is UNAVAILABLE.
GONE = (ray.exceptions.RayActorError, grpc.aio.AioRpcError)

logger = logging.getLogger("ray.serve")


class Phase(Enum):
    """The phase of a model, from the request to load it until it is unloaded."""

    LOADING = "loading"
    LOADED = "loaded"
    FAILED = "failed"
    UNLOADING = "unloading"


# A replica that dies later makes an application unhealthy until there is another.
PHASES = {
    "NOT_STARTED": Phase.LOADING,
    "DEPLOYING": Phase.LOADING,
    "RUNNING": Phase.LOADED,
    "UNHEALTHY": Phase.LOADED,
    "DEPLOY_FAILED": Phase.FAILED,
    "DELETING": Phase.UNLOADING,
}


class ServedModel:
    """One model: a handle to its replicas, and their last known state.

    Attributes:
        id: What clients name it by.
        app: Its Serve application.
        phase: Whether it is served.
        replicas: How many replicas are in which of Serve's states.
        message: Serve's status message.
    """

    def __init__(self, id: str, app: str, limit_s: float) -> None:
        """Initialize the model as loading, without replicas.

        Args:
            id: What clients name it by.
            app: Its Serve application.
            limit_s: Seconds that its replicas give a request.
        """
        self.id = id
        self.app = app
        self.phase = Phase.LOADING
        self.replicas: dict[str, int] = {}
        self.message = ""
        # By value over gRPC: as objects of Ray's, each item of a stream takes twice the processor time.
        self._handle = serve.get_deployment_handle(DEPLOYMENT, app, _check_exists=False).options(
            _by_reference=False, request_serialization="pickle", response_serialization="pickle"
        )
        self._limit_s = limit_s
        self._seen = -FRESH_S  # when it was last known: Serve's controller said it, or a replica took a job

    @property
    def up(self) -> bool:
        """Whether a replica runs, as far as is known."""
        return self.phase is Phase.LOADED and "RUNNING" in self.replicas

    @property
    def stale(self) -> bool:
        """Whether that was known longer ago than it may be."""
        return time.monotonic() - self._seen > FRESH_S

    def update(self, phase: Phase, app: ApplicationStatusOverview | None, asked: float) -> None:
        """Take what Serve said.

        Args:
            phase: Where the model is.
            app: Its application's status in Serve, if there is one.
            asked: When it was asked.
        """
        deployment = app.deployments.get(DEPLOYMENT) if app else None  # gone while it is deleted
        self.phase = phase
        self.replicas = {str(state): count for state, count in deployment.replica_states.items()} if deployment else {}
        self.message = deployment.message if deployment else app.message if app else ""
        self._seen = max(self._seen, asked)

    async def complete(self, job: Job) -> list[Message]:
        """Run a job to its end."""
        sent = time.monotonic()
        async with self._patience():
            messages = await _asked(job, lambda: self._handle.complete.remote(job))
        self._seen = max(self._seen, sent)
        return messages

    async def stream(self, job: Job) -> AsyncGenerator[list[Message]]:
        """Run a job and pass on what gathers; when the caller stops listening, the job is cancelled."""
        sent = time.monotonic()
        handle = self._handle.options(stream=True)
        answers: DeploymentResponseGenerator[Any] | None = None

        async def begin() -> list[Message]:
            nonlocal answers
            answers = cast("DeploymentResponseGenerator[Any]", handle.stream.remote(job))
            return await anext(answers)

        try:
            async with self._patience():
                first = await _asked(job, begin)
            assert answers is not None
            self._seen = max(self._seen, sent)
            yield first
            async for gathered in answers:
                yield gathered
        finally:
            if answers is not None:
                answers.cancel()  # type: ignore[no-untyped-call]

    async def tokenize(self, text: Text) -> dict[str, Any]:
        """A text's tokens.

        Raises:
            ApiError: The model cannot take the text.
        """
        async with self._patience():
            return _answered(await self._handle.tokenize.remote(text))

    async def detokenize(self, tokens: Sequence[int], strings: bool) -> dict[str, Any]:
        """The text of tokens; with `strings`, each token's own, too.

        Raises:
            ApiError: One is no token of the model's.
        """
        async with self._patience():
            return _answered(await self._handle.detokenize.remote(tokens, strings))

    async def run_code(self, job: CodeJob) -> None:
        """Run a client's own code; its updates go to the board of jobs.

        Raises:
            RequestError: It is not for this model, or too many jobs wait.
        """
        await self._handle.run_code.remote(job)  # the board gives up a job that no replica works on

    async def deployment(self) -> dict[str, Any]:
        """The model as `nnsight.status()` reads it."""
        loaded = await self.settings() if self.up else {}
        key = ModelKey(
            repo_id=self.id,
            revision=loaded.get("revision"),
            trust_remote_code=loaded.get("trust_remote_code", False),
        )
        state = "RUNNING" if self.up else "UNHEALTHY"
        where = {"deployment_level": "HOT", "application_state": state, "model_key": key.written()}
        return where | key.model_dump()

    async def check(self, job: Job) -> None:
        """Have a replica look up what a job without prompts records and changes.

        Raises:
            ApiError: The model has no such thing.
        """
        async with self._patience():
            _answered(await self._handle.check.remote(job))

    async def check_readout(self, point: str, hidden: int) -> None:
        """Have a replica look up a readout's point.

        Raises:
            ApiError: The model has none of the name, or rows of another length there.
        """
        async with self._patience():
            _answered(await self._handle.check_readout.remote(point, hidden))

    async def describe(self) -> dict[str, Any]:
        """The model as OpenAI lists it, with `max_model_len` and `savepoints`."""
        async with self._patience(DESCRIBE_S):
            described: dict[str, Any] = await self._handle.describe.remote()
        return {"id": self.id, "object": "model", "owned_by": "vitrine"} | described

    async def structure(self) -> dict[str, Any]:
        """Its architecture, sizes, capture points and modules."""
        async with self._patience(DESCRIBE_S):
            structure: dict[str, Any] = await self._handle.structure.remote()
        return {"id": self.id, "object": "model.structure"} | structure

    async def settings(self) -> dict[str, Any]:
        """How it was loaded, as `/models/load` takes it."""
        async with self._patience(DESCRIBE_S):
            settings: dict[str, Any] = await self._handle.settings.remote()
        return settings

    @asynccontextmanager
    async def _patience(self, limit_s: float | None = None) -> AsyncIterator[None]:
        """Wait for a replica no longer than this, or than it may take.

        Serve's handle waits without end where there is no replica.
        """
        limit_s = limit_s or self._limit_s + GRACE_S
        try:
            async with asyncio.timeout(limit_s):
                yield
        except TimeoutError as error:
            message = f"no replica of {self.id!r} answered within {limit_s:g} s"
            raise ApiError(504, message, code="unavailable") from error


def _answered(answer: dict[str, Any] | Refusal) -> dict[str, Any]:
    if isinstance(answer, Refusal):
        raise ApiError.of(answer)
    return answer


async def _asked(job: Job, ask: Callable[[], Awaitable[list[Message]]]) -> list[Message]:
    """What a replica says first, or, where it ends before it says anything, what another one says.

    A request that stores what it records is not asked again once a replica may have begun it: its runs may be stored
    already.

    One that no replica has begun is asked again for as long as a replica without an engine may be there.

    Raises:
        RayActorError: The second replica has ended, too.
        AioRpcError: Likewise, or the answer could not be sent.
    """
    left = 0 if job.may_store else 1  # times that it is asked again where a replica may have begun it
    refused = 0
    while True:
        try:
            first = await ask()
        except GONE as error:
            lost = isinstance(error, ray.exceptions.RayActorError) or error.code() is grpc.StatusCode.UNAVAILABLE
            if not left or not lost:
                raise
            logger.warning("a replica ended before it answered request %s; another replica gets it: %s", job.id, error)
            left -= 1
            continue
        refusals = {said.message for said in first if isinstance(said, Refusal)}
        if NOT_TAKEN in refusals:
            if refused == MOST_REFUSED:
                return first
            refused += 1
        elif ENGINE_ENDED in refusals and left:
            left -= 1
        else:
            return first
        await asyncio.sleep(AGAIN_S)  # that replica gets requests until its process has ended
