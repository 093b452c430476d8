"""The actors behind the ingress: which models are served, and how to ask them and the store."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Any, cast

import httpx
import ray
from ray import serve
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from deployments.messages import Job, Message
from serve_app.errors import ApiError
from serve_app.exposition import merge

logger = logging.getLogger("ray.serve")
FRESH_S = 1.0  # for how long it is taken as known whether a replica runs


class Backend:
    """Handles to the model's replicas and to the activation store."""

    def __init__(self, name: str, model: DeploymentHandle[Any], store: Any) -> None:
        self._name = name
        # By value over gRPC: as objects of Ray's, each item of a stream takes twice the processor time.
        self._model = model.options(
            _by_reference=False, request_serialization="pickle", response_serialization="pickle"
        )
        self._store = store
        self._up = False
        self._asked = -FRESH_S
        self._asking: asyncio.Future[dict[str, int]] | None = None

    async def models(self) -> list[dict[str, Any]]:
        """Every model as OpenAI lists it."""
        await self._check_up()
        with answering():
            described = await self._model.describe.remote()
        return [{"id": self._name, "object": "model", "owned_by": "vitrine"} | described]

    async def model(self, model_id: str) -> dict[str, Any]:
        """One model.

        Raises:
            ApiError: 404, with the ids that there are.
        """
        self.check_model(model_id)
        return (await self.models())[0]

    def check_model(self, model_id: str) -> None:
        """Refuse a model that is not served.

        Raises:
            ApiError: 404, with the ids that there are.
        """
        if model_id != self._name:
            message = f"the model {model_id!r} is not served here; {self._name!r} is"
            raise ApiError(404, message, "model", "model_not_found")

    async def complete(self, job: Job) -> list[Message]:
        """Run a job to its end."""
        await self._check_up()
        with answering():
            messages: list[Message] = await self._model.complete.remote(job)
        return messages

    async def stream(self, job: Job) -> AsyncGenerator[list[Message]]:
        """Run a job and pass on what gathers; when the caller stops listening, the job is cancelled."""
        await self._check_up()
        answers = cast("DeploymentResponseGenerator[Any]", self._model.options(stream=True).stream.remote(job))
        try:
            with answering():
                async for gathered in answers:
                    yield gathered
        finally:
            answers.cancel()  # type: ignore[no-untyped-call]

    async def sessions(self, limit: int, after: str | None) -> list[dict[str, Any]]:
        """Sessions of stored activations, in the order of their ids."""
        return await self._store.sessions.remote(limit, after)  # type: ignore[no-any-return]

    async def session(self, session_id: str) -> dict[str, Any]:
        """One session with its runs and files.

        Raises:
            ApiError: 404.
        """
        found: dict[str, Any] | None = await self._store.session.remote(session_id)
        if found is None:
            raise _no_session(session_id)
        return found

    async def delete_session(self, session_id: str) -> None:
        """Delete a session; its files are gone when it returns.

        Raises:
            ApiError: 404.
        """
        if not await self._store.delete.remote(session_id):
            raise _no_session(session_id)

    async def health(self) -> tuple[bool, dict[str, Any]]:
        """Whether every model has a replica that can serve, and what `/health` says."""
        states = await self._replica_states()
        running = states.get("RUNNING", 0)
        body = {
            "status": "ok" if running else "unavailable",
            "loaded_models": [self._name] if running else [],
            "replicas": {self._name: states},
        }
        return bool(running), body

    async def metrics(self) -> str:
        """Prometheus text of all nodes, reduced to this project's and Serve's own.

        Raises:
            ApiError: 503, where a node's exporter does not answer.
        """
        nodes = await asyncio.to_thread(ray.nodes)
        exporters = [
            f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
            for node in nodes
            if node["Alive"] and node["MetricsExportPort"] > 0
        ]
        try:
            async with httpx.AsyncClient(timeout=5, trust_env=False) as client:
                answers = await asyncio.gather(*(client.get(exporter) for exporter in exporters))
        except httpx.HTTPError as error:
            raise ApiError(503, f"a node's metrics cannot be read: {error}", code="unavailable") from error
        return merge(answer.text for answer in answers)

    async def _replica_states(self) -> dict[str, int]:
        """How many replicas are in which state; remembers whether one runs."""
        status = await asyncio.to_thread(serve.status)  # asks Serve's controller, and blocks
        app = status.applications.get(serve.get_replica_context().app_name)
        model = app.deployments.get(self._model.deployment_name) if app else None  # gone while it is deleted
        states = {str(state): count for state, count in model.replica_states.items()} if model else {}
        self._up, self._asked = "RUNNING" in states, time.monotonic()
        return states

    async def _check_up(self) -> None:
        """Refuse while no replica runs: Serve's handle would wait for one without end.

        Goes by what was last known, and asks again in the background when that is older than a second.

        Raises:
            ApiError: 503.
        """
        if time.monotonic() - self._asked > FRESH_S and (self._asking is None or self._asking.done()):
            self._asking = asyncio.ensure_future(self._replica_states())
            self._asking.add_done_callback(_log_failure)
        if not self._up and self._asking is not None:
            await asyncio.shield(self._asking)  # others wait for it, too
        if not self._up:
            raise ApiError(503, f"no replica of {self._name!r} runs now; try again", code="unavailable")


@contextmanager
def answering() -> Iterator[None]:
    """Turn what Serve says of an absent replica into the API's own error; it would render it as plain text."""
    try:
        yield
    except RayServeException as error:
        raise ApiError(503, f"no replica can answer now: {error}", code="unavailable") from error


def _log_failure(asking: asyncio.Future[dict[str, int]]) -> None:
    if not asking.cancelled() and (error := asking.exception()):
        logger.warning("Serve's controller does not say which replicas run: %s", error)


def _no_session(session_id: str) -> ApiError:
    return ApiError(404, f"there is no session {session_id!r}", "session_id", "session_not_found")
