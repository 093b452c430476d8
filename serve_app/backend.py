"""The actors behind the ingress: the models, the activation store, and every node's metrics."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any, NamedTuple

import ray

from deployments.activations.filters import EVERYTHING, Filter
from deployments.activations.profiles import Profile
from deployments.client_code.board import connect as board
from deployments.messages import Job
from deployments.options import Options
from serve_app.asking import answered, stored
from serve_app.code_jobs import CodeJobs
from serve_app.errors import ApiError
from serve_app.exposition import Exposition
from serve_app.loading import Loader
from serve_app.models import Models
from serve_app.profiles import Profiles

PLAN_S = 300.0  # the longest that a download waits until the store has looked through the session's files


class Data(NamedTuple):
    """A download.

    Attributes:
        length: Its bytes.
        pieces: Them, in order; closing it ends the reading.
    """

    length: int
    pieces: AsyncGenerator[bytes]


class Backend:
    """Handles to the models and to the activation store.

    Attributes:
        models: The models that are served.
        loader: Loads and unloads others.
        jobs: Clients' own code; None where the operator does not allow it.
        profiles: Profiles of capture and interventions.
        metrics: Prometheus text of all nodes.
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
        self.metrics = Exposition(_exporters)
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

    async def session(self, session_id: str, limit: int | None = None, after: str | None = None) -> dict[str, Any]:
        """One session with its runs, of which there may be more than `limit`, and files.

        Raises:
            RequestError: It has no run `after`.
            ApiError: 404; 503.
        """
        most = None if limit is None else limit + 1
        found: dict[str, Any] | None = await stored(self._store.session.remote(session_id, most, after))
        if found is None:
            raise _no_session(session_id)
        runs = found["runs"]
        return found | {"runs": runs[:limit], "has_more": limit is not None and len(runs) > limit}

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

    async def data(
        self, session_id: str, runs: Sequence[str] | None, points: Sequence[str] | None, format: str
    ) -> Data:
        """What a session holds, as a file of the format.

        Args:
            session_id: The session.
            runs: These runs alone.
            points: These points alone.
            format: `arrow`, `safetensors`, `npz` or `pt`.

        Raises:
            RequestError: There is no such run or point, too much for one file, or no room for more at once.
            ApiError: 404; 503.
        """
        asked = self._store.begin_data.remote(session_id, runs, points, format)
        begun: tuple[str, int] | None = await answered(asked, "the activation store", PLAN_S)
        if begun is None:
            raise _no_session(session_id)
        key, length = begun
        return Data(length, self._pieces(key))

    async def _pieces(self, key: str) -> AsyncGenerator[bytes]:
        """A download's bytes; the next piece is read while one is sent, and no more."""
        try:
            ahead = self._store.more_data.remote(key)
            while piece := await stored(ahead):
                ahead = self._store.more_data.remote(key)
                yield piece
        finally:
            self._store.end_data.remote(key)

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

    async def tensor_file(self, tensor_id: str) -> bytes:
        """A tensor file as it was sent.

        Raises:
            ApiError: 404; 503.
        """
        found: bytes | None = await stored(self._store.tensor_file.remote(tensor_id))
        if found is None:
            raise _no_tensors(tensor_id)
        return found

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


async def _exporters() -> list[str]:
    """The addresses of all nodes' exporters."""
    return [
        f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        for node in await asyncio.to_thread(ray.nodes)
        if node["Alive"] and node["MetricsExportPort"] > 0
    ]


def _no_session(session_id: str) -> ApiError:
    return ApiError(404, f"there is no session {session_id!r}", "session_id", "session_not_found")


def _no_tensors(tensor_id: str) -> ApiError:
    return ApiError(404, f"there is no tensor file {tensor_id!r}", "tensor_id", "tensor_not_found")
