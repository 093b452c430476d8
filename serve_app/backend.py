"""The actors behind the ingress: the models, the activation store, and every node's metrics."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import httpx
import ray

from deployments.activations.downloads import Choice, Found
from deployments.activations.filters import EVERYTHING, Filter
from deployments.activations.profiles import Profile
from deployments.client_code.board import connect as board
from deployments.messages import Job
from deployments.options import Options
from serve_app.asking import answered, stored
from serve_app.code_jobs import CodeJobs
from serve_app.errors import ApiError
from serve_app.exposition import merge
from serve_app.listing import fitting
from serve_app.loading import Loader
from serve_app.models import Models
from serve_app.profiles import Profiles
from serve_app.ranges import Download

PLAN_S = 300.0  # the longest that a page waits until the store has looked through the session's files


class Backend:
    """Handles to the models and to the activation store.

    Attributes:
        models: The models that are served.
        loader: Loads and unloads others.
        jobs: Clients' own code; None where the operator does not allow it.
        profiles: Profiles of capture and interventions.
    """

    def __init__(self, options: Options, app: str, store: Any, local_only: bool = False) -> None:
        """Find the models.

        Args:
            options: The operator's.
            app: The ingress's Serve application.
            store: The activation store's handle.
            local_only: Whether clients' code is run for callers of this machine alone.
        """
        self.models = Models(options, app)
        self.loader = Loader(options, self.models)
        self.jobs = CodeJobs(options, self.models, board(), local_only) if options.allow_client_code else None
        self.profiles = Profiles(store)
        self._store = store
        self._max_tensor_store_bytes = options.max_tensor_store_bytes

    async def sessions(self, limit: int, after: str | None, filter: Filter = EVERYTHING) -> list[dict[str, Any]]:
        """Sessions that hold a stored run of the filter, in the order of their ids.

        Raises:
            ApiError: 503.
        """
        return await stored(self._store.sessions.remote(limit, after, filter))  # type: ignore[no-any-return]

    async def runs(self, filter: Filter, limit: int, after: str | None) -> list[dict[str, Any]]:
        """Stored runs of the filter, the oldest first.

        Raises:
            RequestError: There is no run `after`.
            ApiError: 503.
        """
        return await stored(self._store.runs.remote(filter, limit, after))  # type: ignore[no-any-return]

    async def session(self, session_id: str, limit: int = 100, after: str | None = None) -> dict[str, Any]:
        """One session with `limit` of its runs and whether there are more, and files.

        Raises:
            RequestError: It has no run `after`.
            ApiError: 404; 503.
        """
        found: dict[str, Any] | None = await stored(self._store.session.remote(session_id, limit + 1, after))
        if found is None:
            raise _no_session(session_id)
        runs, has_more = fitting(found["runs"], limit)
        return found | {"runs": runs, "has_more": has_more}

    async def delete_session(self, session_id: str) -> None:
        """Delete a session; its files are gone when it returns.

        Raises:
            RequestError: It is pinned.
            ApiError: 404; 503.
        """
        if not await stored(self._store.delete.remote(session_id)):
            raise _no_session(session_id)

    async def pin_session(self, session_id: str, pinned: bool) -> None:
        """Pin a session, or take its pin away; durable when it returns.

        Raises:
            ApiError: 404; 503.
        """
        if not await stored(self._store.pin.remote(session_id, pinned)):
            raise _no_session(session_id)

    async def data(self, choice: Choice) -> Download:
        """Stored runs as a file.

        Raises:
            RequestError: There is no such run or point, too much for one file, or too many wait for pages.
            ApiError: 404; 503.
        """
        found: Found | None = await answered(self._store.find_data.remote(choice), "the activation store", PLAN_S)
        if found is None:
            raise _no_session(choice.session_id)

        async def read(first: int, end: int) -> bytes:
            asked = self._store.data_page.remote(choice, found.tag, first, end)
            return await answered(asked, "the activation store", PLAN_S)  # type: ignore[no-any-return]

        return Download(found.tag, found.length, read)

    async def put_tensors(self, data: bytes) -> dict[str, Any]:
        """Keep a safetensors file; it is on disk when this returns.

        Raises:
            RequestError: The file is not one that may be kept, or there is no room for it.
            ApiError: 503.
        """
        kept: dict[str, Any] = await stored(self._store.put_tensors.remote(data, self._max_tensor_store_bytes))
        return kept

    async def tensor_files(self, limit: int, after: str | None) -> list[dict[str, Any]]:
        """Tensor files in the order of their ids.

        Raises:
            ApiError: 503.
        """
        return await stored(self._store.tensor_files.remote(limit, after))  # type: ignore[no-any-return]

    async def tensor_file(self, tensor_id: str) -> Download:
        """A tensor file as it was sent.

        Raises:
            ApiError: 404; 503.
        """
        length: int | None = await stored(self._store.tensor_file_bytes.remote(tensor_id))
        if length is None:
            raise _no_tensors(tensor_id)

        async def read(first: int, end: int) -> bytes:
            found: bytes | None = await stored(self._store.tensor_file.remote(tensor_id, first, end))
            if found is None:
                raise _no_tensors(tensor_id)
            return found

        return Download(tensor_id, length, read)

    async def delete_tensors(self, tensor_id: str) -> None:
        """Delete a tensor file; it is gone when this returns.

        Raises:
            ApiError: 404; 503.
        """
        if not await stored(self._store.delete_tensors.remote(tensor_id)):
            raise _no_tensors(tensor_id)

    async def keep_profile(self, profile: Profile, by_admin: bool) -> dict[str, Any]:
        """Keep a profile; where its model is served, only what fits the model.

        Args:
            profile: The profile.
            by_admin: Whether defaults may change.

        Raises:
            RequestError: It is too large, there are too many, or only an admin may change a default.
            ApiError: The model has no such point; 503.
        """
        model = self.models.get(profile.model) if profile.model else None
        if model and model.up:
            specs = tuple(profile.interventions or ())
            await model.check(Job(uuid.uuid4().hex, capture=profile.capture, interventions=specs))
        return await self.profiles.put(profile, by_admin)

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


def _no_session(session_id: str) -> ApiError:
    return ApiError(404, f"there is no session {session_id!r}", "session_id", "session_not_found")


def _no_tensors(tensor_id: str) -> ApiError:
    return ApiError(404, f"there is no tensor file {tensor_id!r}", "tensor_id", "tensor_not_found")
