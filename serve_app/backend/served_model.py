"""One served model: its phase, and calls of its replicas with time limits."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from enum import Enum
from typing import Any, cast

import grpc
import ray
from ray import serve
from ray.serve.handle import DeploymentResponseGenerator
from ray.serve.schema import ApplicationDetails

from deployments.client_code.job import CodeJob, ModelKey
from deployments.errors import LoadError
from deployments.job import Job, Text
from deployments.messages import ENGINE_ENDED, NOT_TAKEN, Message, Refusal
from serve_app.http.errors import ApiError, within

FRESH_S = 1.0  # how long an answer whether a replica runs is reused: asking Serve takes 10 ms of processor time
DESCRIBE_S = 5.0  # the longest wait for a model's description or settings
GRACE_S = 5.0  # so that a replica's own time limit comes first
MOST_REFUSED = 10  # retries of one request; the process of an ended engine has ended by then
AGAIN_S = 1.0  # before another replica gets a request that a replica with an ended engine rejected
DEPLOYMENT = "ModelReplica"

# Prepares a job for another replica after one that may have started it ended; None if it cannot be asked again.
Restart = Callable[[Job], Awaitable[Job | None]]

# Errors of a call whose replica ends: Ray's, and gRPC's UNAVAILABLE, because messages travel by gRPC.
REPLICA_ENDED = (ray.exceptions.RayActorError, grpc.aio.AioRpcError)

logger = logging.getLogger("ray.serve")


class Phase(Enum):
    """The phase of a model, from the request to load it until it is unloaded."""

    LOADING = "loading"
    LOADED = "loaded"
    FAILED = "failed"
    UNLOADING = "unloading"


# A replica that dies later makes an application unhealthy until it is replaced.
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
        id: Its id for clients.
        app: Its Serve application.
        phase: Its phase.
        replicas: The number of replicas in each of Serve's states.
        message: Serve's status message.
        scales_to_zero: Whether it may have no replica; a request then starts one.
        described: What a replica last said of the model; None before the first answer since it was deployed.
    """

    def __init__(self, id: str, app: str, limit_s: float) -> None:
        """Initialize the model as loading, without replicas.

        Args:
            id: Its id for clients.
            app: Its Serve application.
            limit_s: The replicas' time limit for a request in seconds.
        """
        self.id = id
        self.app = app
        self.phase = Phase.LOADING
        self.replicas: dict[str, int] = {}
        self.message = ""
        self.scales_to_zero = False
        self.described: dict[str, Any] | None = None
        self._trigger = ""
        self._deployed = 0.0  # when Serve deployed it
        # By value over gRPC: as Ray objects, each item of a stream takes twice the processor time.
        self._handle = serve.get_deployment_handle(DEPLOYMENT, app, _check_exists=False).options(
            _by_reference=False, request_serialization="pickle", response_serialization="pickle"
        )
        self._limit_s = limit_s
        self._seen = -FRESH_S  # the last time that Serve's controller listed it, or a replica accepted a job

    @property
    def up(self) -> bool:
        """Whether a replica runs, as far as known."""
        return self.phase is Phase.LOADED and "RUNNING" in self.replicas

    @property
    def failure(self) -> LoadError | None:
        """Why none of its replicas starts, if Serve has tried."""
        failed = self.phase is Phase.FAILED or self._trigger == "REPLICA_STARTUP_FAILED"
        if self.up or not (failed or LoadError.quoted(self.message)):
            return None
        return reason(self.message)

    @property
    def at_zero(self) -> bool:
        """Whether it has no replica because it needs none, or the one that a request needs is starting."""
        return self.phase is Phase.LOADED and self.scales_to_zero and not self.up and self.failure is None

    @property
    def stale(self) -> bool:
        """Whether `up` is too old to rely on."""
        return time.monotonic() - self._seen > FRESH_S

    def update(self, phase: Phase, app: ApplicationDetails | None, asked: float) -> None:
        """Update from Serve's status.

        Args:
            phase: The model's phase.
            app: Its application in Serve, if there is one.
            asked: The time of asking for the status.
        """
        deployment = app.deployments.get(DEPLOYMENT) if app else None  # missing while it is deleted
        self.phase = phase
        self.replicas = dict(Counter(replica.state.value for replica in deployment.replicas)) if deployment else {}
        self.message = deployment.message if deployment else app.message if app else ""
        self._trigger = deployment.status_trigger.value if deployment else ""
        scaling = deployment.deployment_config.autoscaling_config if deployment else None
        self.scales_to_zero = isinstance(scaling, dict) and scaling["min_replicas"] == 0
        if app and app.last_deployed_time_s != self._deployed:
            self._deployed, self.described = app.last_deployed_time_s, None
        self._seen = max(self._seen, asked)

    async def complete(self, job: Job, restarted: Restart) -> list[Message]:
        """Run a job to its end."""
        sent = time.monotonic()
        async with self._patience():
            messages = await _asked(job, self._handle.complete.remote, restarted)
        self._seen = max(self._seen, sent)
        return messages

    async def stream(self, job: Job, restarted: Restart) -> AsyncGenerator[list[Message]]:
        """Run a job and pass its messages on; the job is cancelled when the caller stops listening."""
        sent = time.monotonic()
        handle = self._handle.options(stream=True)
        answers: DeploymentResponseGenerator[Any] | None = None

        async def begin(job: Job) -> list[Message]:
            nonlocal answers
            answers = cast("DeploymentResponseGenerator[Any]", handle.stream.remote(job))
            return await anext(answers)

        try:
            async with self._patience():
                first = await _asked(job, begin, restarted)
            assert answers is not None
            self._seen = max(self._seen, sent)
            yield first
            async for gathered in answers:
                yield gathered
        finally:
            if answers is not None:
                answers.cancel()  # type: ignore[no-untyped-call]

    async def tokenize(self, text: Text) -> dict[str, Any]:
        """The tokens of a text.

        Raises:
            ApiError: The model rejects the text.
        """
        async with self._patience():
            return _answered(await self._handle.tokenize.remote(text))

    async def detokenize(self, tokens: Sequence[int], strings: bool) -> dict[str, Any]:
        """The text of tokens; with `strings`, also each token's own text.

        Raises:
            ApiError: One is not a token of the model.
        """
        async with self._patience():
            return _answered(await self._handle.detokenize.remote(tokens, strings))

    async def attribute(self, text: Text, targets: Sequence[str | int], by: str, owner: str | None) -> dict[str, Any]:
        """The parts of a logit after a text, or of the difference of two.

        Raises:
            ApiError: The model has no such parts or tokens.
        """
        async with self._patience():
            parts = _answered(await self._handle.attribute.remote(text, targets, by, owner))
        return {"object": "model.attribution", "model": self.id} | parts

    async def run_code(self, job: CodeJob) -> None:
        """Run a client's code; its updates go to the job board.

        Raises:
            RequestError: It is not for this model, or too many jobs wait.
        """
        await self._handle.run_code.remote(job)  # the board fails a job that no replica runs

    async def deployment(self) -> dict[str, Any]:
        """The model in the form of `nnsight.status()`."""
        loaded = await self.settings() if self.up else {}
        key = ModelKey(
            repo_id=self.id,
            revision=loaded.get("revision"),
            trust_remote_code=loaded.get("trust_remote_code", False),
        )
        state = "RUNNING" if self.up or self.at_zero else "UNHEALTHY"
        where = {"deployment_level": "HOT", "application_state": state, "model_key": key.written()}
        return where | key.model_dump()

    async def check(self, job: Job) -> None:
        """Check the captures and interventions of a job without prompts on a replica.

        Raises:
            ApiError: They do not fit the model.
        """
        async with self._patience():
            _answered(await self._handle.check.remote(job))

    async def check_readout(self, field: str, point: str, hidden: int) -> None:
        """Check a readout's point on a replica; an error names the field.

        Raises:
            ApiError: The model has no such point, or the point's rows have another length.
        """
        async with self._patience():
            _answered(await self._handle.check_readout.remote(field, point, hidden))

    async def describe(self) -> dict[str, Any]:
        """The model in OpenAI's format, with `max_model_len` and `savepoints`.

        Without a replica, of one that may scale to zero, what a replica last said; at least when it was deployed.
        """
        if self.at_zero:
            described = (self.described or {"created": int(self._deployed)}) | {"asleep": True}
        else:
            async with self._patience(DESCRIBE_S):
                described = await self.remember()
        return {"id": self.id, "object": "model", "owned_by": "vitrine"} | described

    async def remember(self) -> dict[str, Any]:
        """What a replica says of the model; without a replica, Serve starts one for this call."""
        described: dict[str, Any] = await self._handle.describe.remote()
        self.described = described
        return described

    async def structure(self) -> dict[str, Any]:
        """Its architecture, sizes, capture points and modules."""
        async with self._patience(DESCRIBE_S):
            structure: dict[str, Any] = await self._handle.structure.remote()
        return {"id": self.id, "object": "model.structure"} | structure

    async def settings(self) -> dict[str, Any]:
        """Its settings, in the form of `/models/load`."""
        async with self._patience(DESCRIBE_S):
            settings: dict[str, Any] = await self._handle.settings.remote()
        return settings

    def _patience(self, limit_s: float | None = None) -> AbstractAsyncContextManager[None]:
        """Limit the wait for a replica; by default to the replica's own limit.

        Without a replica, Serve's handle waits without limit.
        """
        limit_s = limit_s or self._limit_s + GRACE_S
        return within(limit_s, 504, f"no replica of {self.id!r} answered within {limit_s:g} s")


def reason(message: str) -> LoadError:
    """The reason why a model is not loaded: the replica's message, or else the last line of Serve's message."""
    quoted = LoadError.quoted(message)
    if quoted is not None:
        return quoted
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return LoadError(lines[-1] if lines else "its replica did not start", None, "load_failed", 500)


def _answered(answer: dict[str, Any] | Refusal) -> dict[str, Any]:
    if isinstance(answer, Refusal):
        raise ApiError.of(answer)
    return answer


async def _asked(job: Job, ask: Callable[[Job], Awaitable[list[Message]]], restarted: Restart) -> list[Message]:
    """The first messages of a replica; if it ends before it sends any, those of another replica.

    A request that a replica may have started is retried once, unless a run of it may be stored. One that no replica has
    started is retried as long as a replica without an engine may exist.

    Raises:
        RayActorError: The second replica has ended, too, or a run may be stored.
        AioRpcError: The same, or the answer could not be sent.
    """
    refused = 0
    while True:
        try:
            first = await ask(job)
        except REPLICA_ENDED as error:
            lost = isinstance(error, ray.exceptions.RayActorError) or error.code() is grpc.StatusCode.UNAVAILABLE
            if job.attempt or not lost or (again := await restarted(job)) is None:
                raise
            logger.warning("a replica ended before it answered request %s; another replica gets it: %s", job.id, error)
            job = again
            continue
        refusals = {message.message for message in first if isinstance(message, Refusal)}
        if NOT_TAKEN in refusals:
            if refused == MOST_REFUSED:
                return first
            refused += 1
        elif ENGINE_ENDED in refusals and not job.attempt and (again := await restarted(job)):
            job = again
        else:
            return first
        await asyncio.sleep(AGAIN_S)  # that replica receives requests until its process has ended
