"""The actors behind the ingress: the models, the activation store, and every node's metrics."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayTaskError

from deployments.accounts import Account
from deployments.activations.actors.reader import survived
from deployments.activations.actors.store import Deleted
from deployments.activations.facts import StoreError
from deployments.activations.filters import Choice, DownloadInfo, Filter
from deployments.client_code.board import connect as board
from deployments.errors import RequestError
from deployments.job import Job
from deployments.options import Options
from deployments.points.profiles import Profile
from serve_app.backend.client_data import Tensors
from serve_app.backend.code_jobs import CodeJobs
from serve_app.backend.model_loader import Loader
from serve_app.backend.model_registry import Models
from serve_app.backend.profile_registry import Profiles
from serve_app.backend.prometheus import NodeMetrics
from serve_app.backend.readout_registry import Readouts
from serve_app.backend.waiting import answered, stored
from serve_app.http.errors import UNAVAILABLE, ApiError
from serve_app.http.paging import first_page
from serve_app.http.ranges import Download

logger = logging.getLogger("ray.serve")

MOST_FENCES = 10_000
PLAN_S = 300.0  # the longest wait for the store to look through a session's files, or to read a page of a download


class Backend:
    """Handles to the models and to the activation store.

    Attributes:
        models: The served models.
        loader: Loads and unloads further models.
        jobs: Clients' code; None if the operator does not allow it.
        profiles: Profiles of capture and interventions.
        tensors: Clients' safetensors files.
        readouts: Clients' readouts.
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
        self.profiles = Profiles(store)
        self.tensors = Tensors(store, options.max_tensor_store_bytes)
        self.readouts = Readouts(store, self.models, options.max_readout_store_bytes)
        self.metrics = NodeMetrics(_exporters)
        self._store = store
        self._reader = reader
        self._fences = OrderedDict[tuple[str, Account], str]()  # of the last sessions that jobs were admitted to

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
        self, account: Account, session_id: str, limit: int = 100, after: str | None = None
    ) -> dict[str, Any]:
        """One session with `limit` of its runs, their files, and whether there are more runs.

        Raises:
            RequestError: It has no run `after`.
            ApiError: 404; 503.
        """
        found: dict[str, Any] | None = await stored(self._reader.session.remote(session_id, limit + 1, after, account))
        if found is None:
            raise _no_session(session_id)
        runs, has_more = first_page(found["runs"], limit)
        named = {point["uri"] for run in runs for point in run["points"].values()}
        files = [file for file in found["files"] if file["uri"] in named]
        return found | {"runs": runs, "files": files, "has_more": has_more}

    async def delete_session(self, account: Account, session_id: str) -> Sequence[str]:
        """Delete a session; when this returns, its files are deleted except on nodes that are offline.

        Returns:
            The names of the offline nodes, which delete the session when they return.

        Raises:
            RequestError: It is pinned.
            ApiError: 404; 503.
        """
        deleted: Deleted | None = await stored(self._store.delete.remote(session_id, account))
        if deleted is None:
            raise _no_session(session_id)
        for known in [known for known in self._fences if known[0] == session_id]:
            del self._fences[known]
        return deleted.away

    async def pin_session(self, account: Account, session_id: str, pinned: bool) -> None:
        """Pin or unpin a session; durable when this returns.

        Raises:
            ApiError: 404; 503.
        """
        if not await stored(self._store.pin.remote(session_id, pinned, account)):
            raise _no_session(session_id)

    async def share_session(self, account: Account, session_id: str, shared: bool) -> None:
        """Let every key read a session, or end that; durable when this returns.

        Raises:
            ApiError: 404; 503.
        """
        if not await stored(self._store.share.remote(session_id, shared, account)):
            raise _no_session(session_id)

    async def admitted(self, job: Job) -> Job:
        """Admit a job that records into its session; a session without an owner becomes the sender's.

        While the store does not answer, a session stays its sender's. If the store cannot admit the job, the job runs
        without storing and has the reason: its answer is still useful.

        Raises:
            RequestError: The session is another's; 403.
        """
        if job.account.owner is None or not job.may_store:
            return job
        session = job.session_id, job.account
        try:
            fence: str = await stored(self._store.claim.remote(*session))
        except RequestError:
            raise
        except (ApiError, StoreError, *UNAVAILABLE) as error:
            # The store refuses, or this session was not admitted before.
            if isinstance(error, (StoreError, RayTaskError)) or session not in self._fences:
                self._fences.pop(session, None)
                return replace(job, unstorable=str(getattr(error, "cause", None) or error))
            return replace(job, fence=self._fences[session])
        self._fences[session] = fence
        self._fences.move_to_end(session)
        if len(self._fences) > MOST_FENCES:
            self._fences.popitem(last=False)
        return replace(job, fence=fence)

    async def restarted(self, job: Job) -> Job | None:
        """A job for another replica after one that may have begun it ended; its unfinished runs are dropped.

        None if a run of it is stored already, or if that cannot be known: then the job cannot be asked again.
        """
        if job.may_store:
            names = [job.run_id(index) for index in range(job.choices)]
            try:
                withdrawn: bool = await stored(self._store.withdraw.remote(job.session_id, names))
            except (ApiError, StoreError, *UNAVAILABLE) as error:
                logger.warning("request %s is not sent to another replica: %s", job.id, error)
                return None
            if not withdrawn:
                return None
        return replace(job, attempt=job.attempt + 1)

    async def data(self, account: Account, choice: Choice, tag: str | None = None) -> Download:
        """Stored runs as a file.

        Args:
            account: The caller's account.
            choice: The chosen runs.
            tag: The tag of a download to continue: runs stored since its start are left out.

        Raises:
            RequestError: There is no such run or point, they are too large for one file, or too many requests wait for
                pages; 410: a file was deleted.
            StoreError: A file is damaged.
            ApiError: 404; 503.
        """
        what = f"session {choice.session_id}"
        asked = survived(self._reader.find_data.remote(choice, tag, account), what)
        found: DownloadInfo | None = await answered(asked, "the activation store", PLAN_S)
        if found is None:
            raise _no_session(choice.session_id)

        async def read(first: int, end: int) -> bytes:
            asked = survived(self._reader.data_page.remote(choice, found.tag, first, end, account), what)
            return await answered(asked, "the activation store", PLAN_S)  # type: ignore[no-any-return]

        return Download(found.tag, found.length, read)

    async def keep_profile(self, account: Account, profile: Profile) -> dict[str, Any]:
        """Store a profile; if its model is served, the profile must fit the model.

        Args:
            account: The owner's account.
            profile: The profile.

        Raises:
            RequestError: It is too large, there are too many, or only an admin may change a default.
            ApiError: The model has no such point; 503.
        """
        model = self.models.get(profile.model) if profile.model else None
        if model and model.up:
            specs = tuple(profile.interventions or ())
            await model.check(Job(uuid.uuid4().hex, account, capture=profile.capture, interventions=specs))
        return await self.profiles.put(account, profile)


async def _exporters() -> list[str]:
    """The addresses of all nodes' exporters."""
    return [
        f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        for node in await asyncio.to_thread(ray.nodes)
        if node["Alive"] and node["MetricsExportPort"] > 0
    ]


def _no_session(session_id: str) -> ApiError:
    return ApiError(404, f"there is no session {session_id!r}", "session_id", "session_not_found")
