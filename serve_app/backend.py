"""The actors behind the ingress: the models, the activation store, and every node's metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import httpx
import ray

from deployments.client_code.board import connect as board
from deployments.options import Options
from serve_app.code_jobs import CodeJobs
from serve_app.errors import ApiError
from serve_app.exposition import merge
from serve_app.loading import Loader
from serve_app.models import Models

STORE_S = 30.0  # the longest that a request waits for the activation store; a deletion waits for what it writes


class Backend:
    """Handles to the models and to the activation store.

    Attributes:
        models: The models that are served.
        loader: Loads and unloads others.
        jobs: Clients' own code; None where the operator does not allow it.
    """

    def __init__(self, options: Options, app: str, store: Any) -> None:
        """Find the models.

        Args:
            options: The operator's.
            app: The ingress's Serve application.
            store: The activation store's handle.
        """
        self.models = Models(options, app)
        self.loader = Loader(options, self.models)
        self.jobs = CodeJobs(options, self.models, board()) if options.allow_client_code else None
        self._store = store
        self._max_tensor_store_bytes = options.max_tensor_store_bytes

    async def sessions(self, limit: int, after: str | None) -> list[dict[str, Any]]:
        """Sessions of stored activations, in the order of their ids.

        Raises:
            ApiError: 503.
        """
        return await _stored(self._store.sessions.remote(limit, after))  # type: ignore[no-any-return]

    async def session(self, session_id: str) -> dict[str, Any]:
        """One session with its runs and files.

        Raises:
            ApiError: 404; 503.
        """
        found: dict[str, Any] | None = await _stored(self._store.session.remote(session_id))
        if found is None:
            raise _no_session(session_id)
        return found

    async def delete_session(self, session_id: str) -> None:
        """Delete a session; its files are gone when it returns.

        Raises:
            ApiError: 404; 503.
        """
        if not await _stored(self._store.delete.remote(session_id)):
            raise _no_session(session_id)

    async def put_tensors(self, data: bytes) -> dict[str, Any]:
        """Keep a safetensors file; it is on disk when this returns.

        Raises:
            RequestError: The file is not one that may be kept, or there is no room for it.
            ApiError: 503.
        """
        kept: dict[str, Any] = await _stored(self._store.put_tensors.remote(data, self._max_tensor_store_bytes))
        return kept

    async def tensor_files(self, limit: int, after: str | None) -> list[dict[str, Any]]:
        """Tensor files in the order of their ids.

        Raises:
            ApiError: 503.
        """
        return await _stored(self._store.tensor_files.remote(limit, after))  # type: ignore[no-any-return]

    async def tensor_file(self, tensor_id: str) -> bytes:
        """A tensor file as it was sent.

        Raises:
            ApiError: 404; 503.
        """
        found: bytes | None = await _stored(self._store.tensor_file.remote(tensor_id))
        if found is None:
            raise _no_tensors(tensor_id)
        return found

    async def delete_tensors(self, tensor_id: str) -> None:
        """Delete a tensor file; it is gone when this returns.

        Raises:
            ApiError: 404; 503.
        """
        if not await _stored(self._store.delete_tensors.remote(tensor_id)):
            raise _no_tensors(tensor_id)

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


async def _stored(asked: Awaitable[Any]) -> Any:
    """What the activation store answers; what it was asked to do goes on behind the limit.

    Raises:
        ApiError: 503, where it does not answer.
    """
    try:
        async with asyncio.timeout(STORE_S):
            return await asked
    except TimeoutError as error:
        raise ApiError(503, "the activation store does not answer; try again", code="unavailable") from error


def _no_session(session_id: str) -> ApiError:
    return ApiError(404, f"there is no session {session_id!r}", "session_id", "session_not_found")


def _no_tensors(tensor_id: str) -> ApiError:
    return ApiError(404, f"there is no tensor file {tensor_id!r}", "tensor_id", "tensor_not_found")
