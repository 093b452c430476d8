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
from pathlib import Path
from typing import Any

from ray import serve

from deployments.demo_model import WEIGHTS
from deployments.options import DEMO, NO_MODEL, Options
from serve_app.backend.served_model import PHASES, Phase, ServedModel
from serve_app.http.errors import UNAVAILABLE, ApiError, within

logger = logging.getLogger("ray.serve")
CONTROLLER_S = 5.0  # the longest that a request waits for Serve's controller to list the models


class Models:
    """All models by id."""

    def __init__(self, options: Options, app: str) -> None:
        """Initialize with the model that the server starts with; the others come from Serve's status.

        Args:
            options: The operator's options.
            app: The ingress's application.
        """
        self._prefix = f"{app}.models."
        self._known: dict[str, ServedModel] = {}
        self._limit_s = options.request_timeout_s
        self._default = None
        self._models_dir = os.path.normpath(options.models_dir)
        # Further names of the model that the server starts with.
        directories = [options.model, os.path.expanduser(options.model), str(WEIGHTS) if options.model == DEMO else ""]
        self._directories = {os.path.normpath(path): options.served_name for path in directories if path}
        if options.model != NO_MODEL:
            self._default = ServedModel(options.served_name, app, self._limit_s)
        if self._default:
            self._known[self._default.id] = self._default
        self._going: set[str] = set()
        self._asking: asyncio.Future[None] | None = None

    def name_of(self, model_id: str) -> str:
        """The application name of a model that is loaded by its repository id, in which `--` cannot occur."""
        return self._prefix + model_id.replace("/", "--")

    def get(self, model_id: str) -> ServedModel | None:
        """A model in any phase; None if it is unknown."""
        return self._known.get(model_id)

    def is_default(self, model: ServedModel) -> bool:
        """Whether it is the model that the server started with."""
        return model is self._default

    async def find(self, model_id: str | None) -> ServedModel:
        """A model that can serve now; without an id, the one that the server started with, or the only one.

        Raises while no replica runs, because Serve's handle would wait for one without limit. Uses the last known
        state, and refreshes it in the background if it is older than a second.

        Raises:
            ApiError: 404, with the known ids; 503 while it loads or no replica runs.
        """
        if model_id is None and self._default is None:  # another ingress may have loaded one
            await self.refresh()
        model_id = model_id or self._usual()
        model = self._known.get(model_id)
        if model is None or model.phase is not Phase.LOADED or (not model.up and model.stale):
            await self.refresh()
            model = self._known.get(model_id)
        elif model.stale and (self._asking is None or self._asking.done()):
            self._ask_again()
        if model is None or model.phase not in (Phase.LOADED, Phase.LOADING):
            there_are = ", ".join(repr(model.id) for model in self.loaded) or "none"
            message = f"the model {model_id!r} is not served here; the served models are: {there_are}"
            raise ApiError(404, message, "model", "model_not_found")
        if model.phase is Phase.LOADING:
            raise ApiError(503, f"{model_id!r} is being loaded; try again", "model", "model_loading")
        if not model.up:
            raise ApiError(503, f"no replica of {model_id!r} runs now; try again", code="unavailable")
        return model

    async def of_repository(self, repo_id: str) -> ServedModel:
        """The model that nnsight's clients name by a repository or a directory, among the served ones.

        Raises:
            ApiError: See `find`.
        """
        wanted = os.path.normpath(repo_id)
        if wanted in self._directories:
            return await self.find(self._directories[wanted])
        if Path(wanted).is_relative_to(self._models_dir):
            return await self.find(str(Path(wanted).relative_to(self._models_dir)))
        # nnsight asks the hub for the spelling of an id in upper and lower case.
        same = [known for known in self._known if known.lower() == repo_id.lower()]
        return await self.find(same[0] if same else repo_id)

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
        described = await asyncio.gather(*(_describe(model) for model in self.loaded if model.up))
        return [description for description in described if description]

    async def health(self) -> tuple[bool, dict[str, Any]]:
        """Whether every loaded model has a replica that can serve, and the body of `/health`."""
        await self.refresh()
        healthy = all(model.up for model in self.loaded)
        present = [model for model in self._known.values() if model.phase is not Phase.FAILED]
        body = {
            "status": "ok" if healthy else "unavailable",
            "loaded_models": [model.id for model in self.loaded if model.up],
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
        status = await asyncio.to_thread(serve.status)  # calls Serve's controller, and blocks
        known = {}
        for model in self._among(status.applications):
            app = status.applications.get(model.app)
            phase = PHASES[app.status.value] if app else Phase.UNLOADING
            if model is self._default:
                phase = Phase.LOADED  # models of the operator's options must exist
            elif model.id in self._going:
                if phase is Phase.UNLOADING:  # Serve has the deletion: its status is correct from now on
                    self._going.discard(model.id)
                phase = Phase.UNLOADING
            model.update(phase, app, asked)
            known[model.id] = model
        self._known = known

    def _among(self, apps: Iterable[str]) -> Iterator[ServedModel]:
        """The models with applications in Serve, and the one that the server started with."""
        if self._default:
            yield self._default
        for app in apps:
            model_id = app.removeprefix(self._prefix).replace("--", "/")
            if app.startswith(self._prefix) and not (self._default and self._default.id == model_id):
                yield self._known.get(model_id) or ServedModel(model_id, app, self._limit_s)


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
