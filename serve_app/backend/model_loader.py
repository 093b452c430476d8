"""Loading and unloading models while the server runs.

Serve's status is the only record of loaded models. This module keeps only the loads that its ingress waits for.
"""

from __future__ import annotations

import asyncio
from typing import Any

from ray import serve

from deployments.options import Options
from serve_app.backend.deploying import loaded
from serve_app.backend.model_registry import Models
from serve_app.backend.served_model import Phase, reason
from serve_app.http.errors import ApiError
from serve_app.schemas.models import LoadRequest

POLL_S = 0.2  # between two checks of a model's status in Serve
REMOVAL_S = 30.0  # the time for deleting a model beyond the time for its running requests


class Loader:
    """Deploys models as separate Serve applications, and deletes them."""

    def __init__(self, options: Options, models: Models) -> None:
        """Initialize without loads.

        Args:
            options: The operator's options, which set each replica's resources.
            models: The known models.
        """
        self._options = options
        self._models = models
        self._loads: dict[str, tuple[LoadRequest, asyncio.Task[None]]] = {}
        self._deletions: dict[str, asyncio.Task[None]] = {}

    async def load(self, asked: LoadRequest) -> dict[str, Any]:
        """Load a model, or return at once if it is already loaded; returns its settings.

        A caller that stops waiting does not stop the load.

        Raises:
            ApiError: 403 if it needs its own code; 409 if it is loaded with other settings; 504.
            LoadError: It cannot be loaded; it is removed completely.
        """
        if asked.trust_remote_code and not self._options.allow_remote_code:
            message = "this server does not run a repository's own code: its operator can set allow_remote_code"
            raise ApiError(403, message, "trust_remote_code", "remote_code_not_allowed")
        await self._models.refresh()
        model = self._models.get(asked.served_name)
        if model is None or model.phase is not Phase.LOADED:
            await asyncio.shield(self._joined(asked))
        return await self._loaded(asked)

    async def unload(self, model_id: str) -> dict[str, Any]:
        """Finish the requests of a model's replicas, then delete them.

        Raises:
            ApiError: 404; 409 for the model that the server started with; 504, while the deletion continues.
        """
        await self._models.refresh()
        model = self._models.get(model_id)
        if model is None:
            raise ApiError(404, f"no model {model_id!r} is loaded", "model_id", "model_not_found")
        if self._models.is_default(model):
            message = (
                "the server was started with this model, which cannot be unloaded: start a server "
                "with model=none to load and unload all of its models"
            )
            raise ApiError(409, message, "model_id", "model_is_default")
        deletion = self._deletion(model_id)
        await asyncio.wait([deletion], timeout=self._options.request_timeout_s + REMOVAL_S)
        if not deletion.done():
            message = f"{model_id!r} takes no more requests, but some still run; its deletion continues"
            raise ApiError(504, message, "model_id", "unload_timeout")
        deletion.result()
        return {"ok": True, "model": model_id}

    def _joined(self, asked: LoadRequest) -> asyncio.Task[None]:
        """The only load of a model in progress; starts one if there is none.

        Raises:
            ApiError: 409 if the load in progress has other settings.
        """
        if asked.served_name in self._loads:
            other, task = self._loads[asked.served_name]
            under_way = other.model_dump(mode="json")
            if any(under_way[name] != value for name, value in asked.settings.items()):
                message = f"{asked.served_name!r} is being loaded with other settings; try again when it is loaded"
                raise ApiError(409, message, "model_id", "model_loading")
            return task
        task = asyncio.create_task(self._deploy(asked))
        self._loads[asked.served_name] = asked, task
        task.add_done_callback(lambda _: self._loads.pop(asked.served_name))
        task.add_done_callback(_retrieve)
        return task

    async def _deploy(self, asked: LoadRequest) -> None:
        """Deploy a model and wait until all its replicas serve; on failure, delete it again.

        All of it shares one deadline. A deletion may continue after it; the next load of the model waits for that.
        """
        deadline = asyncio.get_running_loop().time() + self._options.load_timeout_s
        running: asyncio.Future[Any] | None = None
        try:
            async with asyncio.timeout_at(deadline):
                model = self._models.get(asked.served_name)
                over = model is not None and model.phase in (Phase.FAILED, Phase.UNLOADING)
                if over or asked.served_name in self._deletions:
                    await asyncio.shield(self._deletion(asked.served_name))
                    model = self._models.get(asked.served_name)
                if model is None:  # otherwise another ingress loads it, or one that no longer exists did
                    running = asyncio.ensure_future(asyncio.to_thread(self._run, asked))
                    await asyncio.shield(running)
                await self._until_loaded(asked.served_name)
        except TimeoutError as error:
            model = self._models.get(asked.served_name)
            last = reason(model.message).message if model and model.phase is Phase.LOADING and model.message else ""
            message = f"it was not loaded within this server's limit of {self._options.load_timeout_s:g} s. {last}"
            await self._give_up(asked.served_name, deadline, running)
            raise ApiError(504, message.strip(), "model_id", "load_timeout") from error
        except Exception:  # after any failure, remove what was deployed, then re-raise
            await self._give_up(asked.served_name, deadline, running)
            raise

    def _run(self, asked: LoadRequest) -> None:
        """In a thread, since Serve blocks on its controller."""
        options = self._options.of_another(asked.model_id, asked.settings)
        target = serve.RunTarget(loaded(options), name=self._models.name_of(asked.served_name), route_prefix=None)
        serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)

    async def _until_loaded(self, model_id: str) -> None:
        """Wait for a model until it is loaded.

        Raises:
            LoadError: It cannot be loaded.
            ApiError: 409 if it is unloaded meanwhile.
        """
        while True:
            await self._models.refresh(limit_s=None)
            model = self._models.get(model_id)
            if model is None or model.phase is Phase.UNLOADING:
                raise ApiError(409, f"{model_id!r} was unloaded while it was loaded", "model_id", "model_unloaded")
            # Serve counts failures until one replica has started; it retries the others without limit.
            if model.failure:
                raise model.failure
            if model.at_zero:  # to know that it can be loaded
                return await self._models.awake(model, self._options.load_timeout_s)
            if model.phase is Phase.LOADED:
                return None
            await asyncio.sleep(POLL_S)

    async def _give_up(self, model_id: str, deadline: float, running: asyncio.Future[Any] | None) -> None:
        """Delete the remains of a failed load; wait at most `REMOVAL_S` past the deadline."""
        left = deadline + REMOVAL_S - asyncio.get_running_loop().time()
        await asyncio.wait([self._deletion(model_id, running)], timeout=left)

    def _deletion(self, model_id: str, running: asyncio.Future[Any] | None = None) -> asyncio.Task[None]:
        """The only deletion of a model in progress; starts one if there is none.

        Args:
            model_id: The model.
            running: Its deployment, which must finish first.
        """
        if model_id not in self._deletions:
            task = asyncio.create_task(self._delete(model_id, running))
            self._deletions[model_id] = task
            task.add_done_callback(lambda _: self._deletions.pop(model_id))
            task.add_done_callback(_retrieve)
        return self._deletions[model_id]

    async def _delete(self, model_id: str, running: asyncio.Future[Any] | None) -> None:
        """Delete a model's application; it is removed when this returns. Serve finishes its requests first."""
        if running is not None:  # runs in a thread, which cannot be stopped
            await asyncio.wait([running])
            await self._models.refresh(limit_s=None)
        model = self._models.get(model_id)
        if model is None:
            return
        with self._models.going(model):
            await asyncio.to_thread(serve.delete, model.app, _blocking=False)
            while model is not None and model.phase is Phase.UNLOADING:  # another ingress may load it again
                await asyncio.sleep(POLL_S)
                await self._models.refresh(limit_s=None)
                model = self._models.get(model_id)

    async def _loaded(self, asked: LoadRequest) -> dict[str, Any]:
        """The loaded model, if it has the requested settings.

        Raises:
            ApiError: 409, with the first setting that differs.
        """
        model = await self._models.find(asked.served_name)
        settings = await model.settings()
        for name, value in asked.settings.items():
            if settings[name] != value:
                message = f"{asked.served_name!r} is loaded with {name} {settings[name]!r}: unload it first"
                raise ApiError(409, message, name, "model_loaded_otherwise")
        return {"ok": True, "model": model.id, "savepoints": settings["savepoints"]}


def _retrieve(task: asyncio.Task[None]) -> None:
    """Retrieve the exception of a task without a caller; asyncio would warn otherwise."""
    if not task.cancelled():
        task.exception()
