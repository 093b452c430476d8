"""The served models, derived only from Serve's status, and the handles to call them.

The model that the server started with belongs to the ingress's application. Each other model is its own application,
named after the ingress's and the model: `default.models.Qwen--Qwen3-0.6B` is `Qwen/Qwen3-0.6B`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray.serve.context import _get_global_client  # the only way to read whether a deployment scales to zero
from ray.serve.schema import ApplicationDetails, ServeInstanceDetails

from deployments.demo_model import WEIGHTS
from deployments.errors import LoadError
from deployments.options import DEMO, NO_MODEL, Options, adapted
from deployments.serve_actors import MODELS
from serve_app.backend.served_model import PHASES, Phase, ServedModel
from serve_app.http.errors import UNAVAILABLE, ApiError, within

logger = logging.getLogger("ray.serve")
LOOK_S = 0.5  # between two looks whether a replica that a request waits for has failed to start
CONTROLLER_S = 5.0  # the longest that a request waits for Serve's controller to list the models


class Models:
    """All models by id."""

    def __init__(self, options: Options, app: str) -> None:
        """Initialize with the model that the server starts with; the others come from Serve's status.

        Args:
            options: The operator's options.
            app: The ingress's application.
        """
        self._prefix = f"{app}{MODELS}"
        self._known: dict[str, ServedModel] = {}
        self._limit_s = options.request_timeout_s
        self._most_waiting = options.max_running + options.max_queued  # as many as one replica holds
        self._starts: dict[str, _Start] = {}
        self._default = None
        self._models_dir = os.path.normpath(options.models_dir)
        # Places of models, each with the model's name.
        directories = [options.model, os.path.expanduser(options.model)]
        self._names = {os.path.normpath(path): options.model for path in directories} | {
            os.path.normpath(WEIGHTS): DEMO
        }
        self._served = options.model, self._name(options.adapter or "")
        if options.model != NO_MODEL:
            self._default = ServedModel(options.served_name, app, self._limit_s)
        if self._default:
            self._known[self._default.id] = self._default
        self._going: set[str] = set()
        self._asking: asyncio.Future[None] | None = None
        self._asides: set[asyncio.Future[Any]] = set()  # asyncio itself holds tasks by weak references

    def name_of(self, model_id: str) -> str:
        """The application name of a model that is loaded by its repository id, in which `--` cannot occur."""
        return self._prefix + model_id.replace("/", "--")

    def get(self, model_id: str) -> ServedModel | None:
        """A model in any phase; None if it is unknown."""
        return self._known.get(model_id)

    def is_default(self, model: ServedModel) -> bool:
        """Whether it is the model that the server started with."""
        return model is self._default

    async def find(self, model_id: str | None, at_zero: bool = False) -> ServedModel:
        """A model that can serve now; without an id, the one that the server started with, or the only one.

        Waits for a replica only of a model that may scale to zero: Serve's handle would wait for another without limit.
        Uses the last known state, and refreshes it in the background if it is older than a second.

        Args:
            model_id: Its id.
            at_zero: Whether it may be one without a replica that has described itself before.

        Raises:
            ApiError: 404, with the known ids; 503 while it loads, no replica runs or none can start; 429 if too many
                requests wait for its first replica; 504 if it does not start.
        """
        if model_id is None and self._default is None:  # another ingress may have loaded one
            await self.refresh()
        model_id = model_id or self._usual()
        model = self._known.get(model_id)
        if model is None or model.phase is not Phase.LOADED or (model.stale and (model.scales_to_zero or not model.up)):
            try:
                await self.refresh()
            except ApiError:
                if model is None or not model.up:
                    raise
            model = self._known.get(model_id)
        elif model.stale and (self._asking is None or self._asking.done()):
            self._ask_again()
        if model is None or model.phase is Phase.UNLOADING:
            there_are = ", ".join(repr(model.id) for model in self.loaded) or "none"
            message = f"the model {model_id!r} is not served here; the served models are: {there_are}"
            raise ApiError(404, message, "model", "model_not_found")
        if model.failure:
            raise _cannot_start(model, model.failure)
        if model.phase is Phase.LOADING:
            raise ApiError(503, f"{model_id!r} is being loaded; try again", "model", "model_loading")
        if model.at_zero:
            if not (at_zero and model.described):
                try:
                    await self.awake(model)
                except LoadError as error:
                    raise _cannot_start(model, error) from error
        elif not model.up:
            raise ApiError(503, f"no replica of {model_id!r} runs now; try again", code="unavailable")
        return model

    async def awake(self, model: ServedModel, limit_s: float | None = None) -> None:
        """Wait until a replica of a model that has none runs; all that wait share one start.

        Args:
            model: The model.
            limit_s: The longest wait; by default that of a request.

        Raises:
            ApiError: 429 if too many wait; 503 if the model is unloaded meanwhile; 504.
            LoadError: The replica cannot start.
        """
        limit_s = limit_s or self._limit_s
        start = self._starts.get(model.id)
        if start is None:
            start = self._starts[model.id] = _Start(asyncio.ensure_future(self._start(model)))
        if start.waiting >= self._most_waiting:
            message = f"{start.waiting} requests wait for the first replica of {model.id!r}; try again later"
            raise ApiError(429, message, code="server_busy")
        start.waiting += 1
        try:
            async with within(limit_s, 504, f"no replica of {model.id!r} started within {limit_s:g} s"):
                await asyncio.shield(start.running)
        finally:
            start.waiting -= 1
            if not start.waiting:  # Serve goes on starting it until its delay of scaling down is over
                start.running.cancel()
                del self._starts[model.id]

    async def _start(self, model: ServedModel) -> None:
        """Call a model without a replica, for which Serve starts one, until it answers or its replica fails."""
        answer = asyncio.ensure_future(model.remember())
        try:
            while not (await asyncio.wait([answer], timeout=LOOK_S))[0]:
                await self.refresh(limit_s=None)
                if self._known.get(model.id) is not model or model.phase is not Phase.LOADED:
                    raise ApiError(503, f"{model.id!r} was unloaded while it started", "model", "model_unloaded")
                if model.failure:
                    raise model.failure
            answer.result()
            await self.refresh(limit_s=None)
        finally:
            answer.cancel()

    async def of_repository(self, repo_id: str, adapter: str) -> ServedModel:
        """The model that nnsight's clients name by a repository or a directory, among the served ones.

        Args:
            repo_id: The model.
            adapter: The adapter in its weights, named likewise; empty for none, or for a model that goes by its id.

        Raises:
            ApiError: See `find`.
        """
        named = self._name(repo_id), self._name(adapter)
        if self._default and named == self._served:
            return await self.find(self._default.id)
        wanted = adapted(*named)
        # nnsight asks the hub for the spelling of an id in upper and lower case.
        same = [known for known in self._known if known.lower() == wanted.lower()]
        return await self.find(same[0] if same else wanted)

    def _name(self, source: str) -> str:
        """The name of a repository, or of a directory below that of the models; the path of another directory."""
        if not source:
            return source
        path = Path(os.path.normpath(os.path.expanduser(source)))
        name = path.relative_to(self._models_dir) if path.is_relative_to(self._models_dir) else path
        return self._names.get(str(path), str(name))

    def _usual(self) -> str:
        if self._default:
            return self._default.id
        if len(self.loaded) != 1:
            raise ApiError(400, f"{len(self.loaded)} models are served: name one as model", "model", "invalid_value")
        return self.loaded[0].id

    @property
    def loaded(self) -> list[ServedModel]:
        """All served models, as far as known."""
        return [model for model in self._known.values() if model.phase is Phase.LOADED]

    async def describe(self) -> list[dict[str, Any]]:
        """All models that can answer now, in OpenAI's format."""
        await self.refresh()
        described = await asyncio.gather(*(_describe(model) for model in self.loaded if model.up or model.at_zero))
        return [description for description in described if description]

    async def health(self) -> tuple[bool, dict[str, Any]]:
        """Whether every loaded model has a replica that can serve, or needs none, and the body of `/health`."""
        await self.refresh()
        can_serve = [model.id for model in self.loaded if model.up or model.at_zero]
        healthy = len(can_serve) == len(self.loaded)
        present = [model for model in self._known.values() if model.phase is not Phase.FAILED]
        body = {
            "status": "ok" if healthy else "unavailable",
            "loaded_models": can_serve,
            "replicas": {model.id: model.replicas for model in present},
        }
        return healthy, body

    @contextmanager
    def going(self, model: ServedModel) -> Iterator[None]:
        """Send no more requests to a model, even before Serve's status shows its deletion."""
        self._going.add(model.id)
        model.phase = Phase.UNLOADING
        try:
            yield
        finally:
            self._going.discard(model.id)

    async def refresh(self, limit_s: float | None = CONTROLLER_S) -> None:
        """Refresh the models from Serve; the result is no older than this call.

        Args:
            limit_s: The longest wait; None if the caller has a deadline of its own.

        Raises:
            ApiError: 503 if the controller does not answer.
        """
        async with within(limit_s, 503, "Serve's controller does not answer; try again"):
            before = self._asking
            if before is not None and not before.done():
                await asyncio.wait([before])
            if self._asking is before:  # otherwise another waiting call has asked since
                self._ask_again()
            assert self._asking is not None
            await asyncio.shield(self._asking)  # shielded: asking again would only block another thread

    def _ask_again(self) -> None:
        self._asking = asyncio.ensure_future(self._ask())
        self._asking.add_done_callback(_log_failure)

    async def _ask(self) -> None:
        asked = time.monotonic()
        apps = await asyncio.to_thread(_applications)  # calls Serve's controller, and blocks
        known = {}
        for model in self._among(apps):
            app = apps.get(model.app)
            phase = PHASES[app.status.value] if app else Phase.UNLOADING
            if model is self._default:
                phase = Phase.LOADED  # models of the operator's options must exist
            elif model.id in self._going:
                if phase is Phase.UNLOADING:  # Serve has the deletion: its status is correct from now on
                    self._going.discard(model.id)
                phase = Phase.UNLOADING
            model.update(phase, app, asked)
            known[model.id] = model
            if model.up and model.scales_to_zero and model.described is None:
                self._asides.add(aside := asyncio.ensure_future(_describe(model)))
                aside.add_done_callback(self._asides.discard)
        self._known = known

    def _among(self, apps: Iterable[str]) -> Iterator[ServedModel]:
        """The models with applications in Serve, and the one that the server started with."""
        if self._default:
            yield self._default
        for app in apps:
            model_id = app.removeprefix(self._prefix).replace("--", "/")
            if app.startswith(self._prefix) and not (self._default and self._default.id == model_id):
                yield self._known.get(model_id) or ServedModel(model_id, app, self._limit_s)


@dataclass(eq=False)
class _Start:
    """The start of a first replica, and the number of requests that wait for it."""

    running: asyncio.Future[None]
    waiting: int = 0


def _applications() -> dict[str, ApplicationDetails]:
    client = _get_global_client()
    assert client is not None
    return ServeInstanceDetails(**client.get_serve_details()).applications


def _cannot_start(model: ServedModel, failure: LoadError) -> ApiError:
    return ApiError(503, f"{model.id!r} cannot be loaded: {failure.message}", "model", failure.code)


async def _describe(model: ServedModel) -> dict[str, Any] | None:
    """One model's entry in a list; None if it does not answer, so that the others are still listed."""
    try:
        return await model.describe()
    except (ApiError, *UNAVAILABLE) as error:
        logger.warning("%s is missing from the list of models: %s", model.id, error)
        return None


def _log_failure(asking: asyncio.Future[None]) -> None:
    if not asking.cancelled() and (error := asking.exception()):
        logger.warning("Serve's controller does not answer which models there are: %s", error)
