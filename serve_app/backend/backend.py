"""The actors behind the ingress: the models, the activation store, and every node's metrics."""

from __future__ import annotations

import asyncio
import logging
import uuid
from dataclasses import replace
from typing import Any

import ray

from deployments.accounts import Account
from deployments.activations.actors.reader import survived
from deployments.activations.facts import StoreError
from deployments.activations.filters import FilePart, Filter
from deployments.client_code.board import connect as board
from deployments.job import Job
from deployments.options import Options
from serve_app.backend.client_data import Lenses, Readouts, Tensors, stored
from serve_app.backend.code_jobs import CodeJobs
from serve_app.backend.model_loader import Loader
from serve_app.backend.model_registry import Models
from serve_app.backend.preset_registry import Presets
from serve_app.backend.prometheus import NodeMetrics
from serve_app.http.errors import UNAVAILABLE, ApiError
from serve_app.http.paging import Read, first_page
from serve_app.schemas.presets import PresetBody

logger = logging.getLogger("ray.serve")


class Backend:
    """Handles to the models and to the activation store.

    Attributes:
        models: The served models.
        loader: Loads and unloads further models.
        jobs: Clients' code; None if the operator does not allow it.
        presets: Fields of requests under names.
        tensors: Clients' safetensors files.
        readouts: Clients' readouts.
        lenses: Clients' fitted lenses.
        metrics: Prometheus text of all nodes.
    """

    def __init__(self, options: Options, app: str, store: Any, reader: Any) -> None:
        """Initialize the registries.

        Args:
            options: The operator's options.
            app: The ingress's Serve application.
            store: The activation store's handle.
            reader: Its reader's handle.
        """
        self.models = Models(options, app)
        self.loader = Loader(options, self.models)
        self.jobs = CodeJobs(options, self.models, board()) if options.allow_client_code else None
        self.presets = Presets(store)
        root, most = options.activations_dir, options.max_client_store_bytes
        self.tensors = Tensors(store, root, most)
        self.readouts = Readouts(store, root, self.models, most)
        self.lenses = Lenses(store, root, self.models, most)
        self.metrics = NodeMetrics(_exporters)
        self._store = store
        self._reader = reader

    async def sessions(self, account: Account, limit: int, after: str | None, filter: Filter) -> list[dict[str, Any]]:
        """Sessions with a stored run that matches the filter, in the order of their ids.

        Raises:
            ApiError: 503.
        """
        return await stored(self._reader.sessions.remote(limit, after, filter, account))  # type: ignore[no-any-return]

    async def runs(self, account: Account, filter: Filter, limit: int, after: str | None) -> list[dict[str, Any]]:
        """Stored runs that match the filter, the oldest first.

        Raises:
            RequestError: There is no run `after`.
            ApiError: 503.
        """
        return await stored(self._reader.runs.remote(filter, limit, after, account))  # type: ignore[no-any-return]

    async def session(
        self,
        account: Account,
        session_id: str,
        limit: int = 100,
        after: str | None = None,
        owner: str | None = None,
    ) -> dict[str, Any]:
        """One session with `limit` of its runs, their files, and whether there are more runs.

        Raises:
            RequestError: It has no run `after`; 409, several owners have a session of that name.
            ApiError: 404; 503.
        """
        call = self._reader.session.remote(session_id, limit + 1, after, account, owner)
        session: dict[str, Any] | None = await stored(call)
        if session is None:
            raise _no_session(session_id)
        runs, has_more = first_page(session["runs"], limit)
        named = {run["file"] for run in runs}
        files = [file for file in session["files"] if file["name"] in named]
        return session | {"runs": runs, "files": files, "has_more": has_more}

    def file(self, account: Account, session_id: str, name: str, owner: str | None = None) -> Read:
        """Reads one of a session's files.

        Raises:
            RequestError: 409, several owners have a session of that name; 410, only the bucket has the file.
            ApiError: 404; 503.
        """

        async def read(first: int, end: int) -> FilePart:
            call = self._reader.file.remote(session_id, name, first, end, account, owner)
            part: FilePart | None = await stored(survived(call, f"session {session_id}"))
            if part is None:
                raise ApiError(404, f"there is no file {name!r} of a session {session_id!r}", "name", "file_not_found")
            return part

        return read

    async def delete_session(self, account: Account, session_id: str, owner: str | None = None) -> None:
        """Delete a session; its files are deleted when this returns.

        Raises:
            RequestError: It is pinned, or several owners have a session of that name.
            ApiError: 404; 503.
        """
        if not await stored(self._store.delete.remote(session_id, account, owner)):
            raise _no_session(session_id)

    async def pin_session(self, account: Account, session_id: str, pinned: bool, owner: str | None = None) -> None:
        """Pin or unpin a session; durable when this returns.

        Raises:
            RequestError: 409, several owners have a session of that name.
            ApiError: 404; 503.
        """
        if not await stored(self._store.pin.remote(session_id, pinned, account, owner)):
            raise _no_session(session_id)

    async def restarted(self, job: Job) -> Job | None:
        """A job for another replica after one that may have started it ended; its unfinished runs are dropped.

        None if a run of it is stored already, or if that cannot be known: then the job cannot be asked again.
        """
        if job.may_store:
            names = [job.run_id(index) for index in range(job.choices)]
            try:
                withdrawn: bool = await stored(self._store.withdraw.remote(job.session, names))
            except (ApiError, StoreError, *UNAVAILABLE) as error:
                logger.warning("request %s is not sent to another replica: %s", job.id, error)
                return None
            if not withdrawn:
                return None
        return replace(job, attempt=job.attempt + 1)

    async def keep_preset(self, account: Account, preset: PresetBody) -> dict[str, Any]:
        """Store a preset; if its model is served, the preset must fit the model.

        Args:
            account: The owner's account.
            preset: The preset.

        Raises:
            RequestError: It is too large, there are too many, or only an admin may change a default.
            ApiError: The model has no such point, or there is no such tensor or readout; 503.
        """
        model = self.models.get(preset.model) if preset.model else None
        if model and model.up:
            job = Job(
                uuid.uuid4().hex,
                account,
                capture=preset.capture,
                interventions=tuple(preset.interventions or ()),
                readouts=tuple(preset.readouts or ()),
                stop_when=preset.stop_when,
                logit_lens=preset.logit_lens,
            )
            await model.check(job)
        return await self.presets.put(account, preset)


async def _exporters() -> list[str]:
    return [
        f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        for node in await asyncio.to_thread(ray.nodes)
        if node["Alive"] and node["MetricsExportPort"] > 0
    ]


def _no_session(session_id: str) -> ApiError:
    return ApiError(404, f"there is no session {session_id!r}", "session_id", "session_not_found")
