"""The board: status, updates and results of all clients' jobs, in one named actor of the cluster.

A client's socket and its requests may reach different ingresses, and its job may run on another node.
"""

from __future__ import annotations

import asyncio
import secrets
import time
import uuid
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from deployments.accounts import OPERATOR, Account
from deployments.client_code.job import LAST, Update
from deployments.clusters import ON_HEAD, detached
from deployments.errors import RequestError

MOST_JOBS = 1024  # kept at once; for a further one, the oldest ended job of the owner with the most jobs is removed
MOST_LISTENERS = 1024
MAX_PENDING_UPDATES = 10_000  # updates that wait for a listener; the oldest are dropped
KEEP_S = 3600.0  # how long an ended job and its result are kept
JOB_TIMEOUT_S = 30.0  # without a heartbeat of the replica, after which a job is lost
POLL_S = 20.0  # the longest wait of a listener's call
LISTENER_TIMEOUT_S = 60.0  # without a call of its ingress, after which a listener is removed
RESULTS_BYTES = 1 << 30  # of all results together; the oldest of the owner with the most bytes are removed first

_NO_LISTENER = "no client is connected with this id: subscribe first", "session_id", "session_not_found", 404


@dataclass(eq=False)
class _Job:
    latest: Update
    listener: str | None
    owner: str | None  # the sender
    last_seen: float  # the last report of its replica, or its end
    result: list[bytes] = field(default_factory=list)
    token: str = field(default_factory=secrets.token_urlsafe)  # required to fetch the result

    @property
    def ended(self) -> bool:
        """Whether its last status is final."""
        return self.latest.status in LAST


@dataclass(eq=False)
class _Listener:
    owner: str | None
    updates: deque[Update] = field(default_factory=lambda: deque(maxlen=MAX_PENDING_UPDATES))
    news: asyncio.Event = field(default_factory=asyncio.Event)
    last_seen: float = field(default_factory=time.monotonic)  # the last call of its ingress


class Board:
    """All clients' jobs with their latest status and result, and the listeners that receive updates.

    One actor for the cluster: a client's socket, its requests and its job may be on three different processes.
    """

    def __init__(self) -> None:
        self._jobs: dict[str, _Job] = {}
        self._listeners: dict[str, _Listener] = {}

    async def listen(self, owner: str | None = None) -> str:
        """Add a listener of an owner, None without API keys, and return its id.

        Raises:
            RequestError: There are too many.
        """
        self._sweep()
        if len(self._listeners) >= MOST_LISTENERS:
            raise RequestError(
                f"{MOST_LISTENERS} clients are connected already: try again later", None, "server_busy", 429
            )
        name = uuid.uuid4().hex
        self._listeners[name] = _Listener(owner)
        return name

    async def updates(self, listener: str) -> list[Update]:
        """Wait for updates that a listener has not received; may return none.

        Raises:
            RequestError: There is no such listener.
        """
        if listener not in self._listeners:
            raise RequestError(*_NO_LISTENER)
        entry = self._listeners[listener]
        self._sweep()
        try:
            async with asyncio.timeout(POLL_S):
                await entry.news.wait()
        except TimeoutError:
            return []
        gathered = list(entry.updates)
        entry.updates.clear()
        entry.news.clear()
        return gathered

    async def listens(self, listener: str) -> None:
        """Record that a listener is still connected."""
        self._sweep()
        if entry := self._listeners.get(listener):
            entry.last_seen = time.monotonic()

    async def leave(self, listener: str) -> None:
        """Remove a listener. Its jobs stop at their next heartbeat."""
        self._listeners.pop(listener, None)

    async def open(self, listener: str | None, owner: str | None = None) -> str:
        """Add a job and return its id.

        Args:
            listener: The listener that receives its updates; None if its client polls.
            owner: The sender; None without API keys.

        Raises:
            RequestError: The owner has no such listener, or there are too many jobs.
        """
        self._sweep()
        if listener is not None and (listener not in self._listeners or self._listeners[listener].owner != owner):
            raise RequestError(*_NO_LISTENER)
        if len(self._jobs) >= MOST_JOBS:
            ended = [(name, job.owner) for name, job in self._jobs.items() if job.ended]  # the oldest first
            if not ended:
                raise RequestError(
                    f"{MOST_JOBS} jobs are running or waiting: try again later", None, "server_busy", 429
                )
            [(most, _)] = Counter(of for _, of in ended).most_common(1)
            del self._jobs[next(name for name, of in ended if of == most)]
        name = uuid.uuid4().hex
        self._jobs[name] = _Job(Update(name, "RECEIVED"), listener, owner, time.monotonic())
        return name

    async def post(self, updates: list[Update], result: list[bytes]) -> None:
        """Record updates of jobs and pass them to the jobs' listeners. Unknown and ended jobs are ignored.

        Args:
            updates: The updates in order.
            result: The result of the finished job, if the client is to fetch it; otherwise empty.
        """
        for update in updates:
            job = self._jobs.get(update.id)
            if job is not None:
                self._note(job, update, result)

    async def heartbeat(self, job_id: str) -> bool:
        """Record that a replica still runs a job; false if no client waits for it, so that it may stop."""
        job = self._jobs.get(job_id)
        if job is None or job.ended or (job.listener is not None and job.listener not in self._listeners):
            return False
        job.last_seen = time.monotonic()
        return True

    async def latest(self, job_id: str, account: Account = OPERATOR) -> tuple[Update, str | None] | None:
        """A job's latest update, and the token that fetches its result, if it has one.

        None if the account has no such job.
        """
        self._sweep()
        job = self._jobs.get(job_id)
        if job is None or not account.may_change(job.owner):
            return None
        return job.latest, job.token if job.result else None

    async def result(self, job_id: str, token: str, first: int, end: int) -> tuple[str | None, int, bytes] | None:
        """A finished job's owner, its result's length, and the bytes from `first` to `end`; None if there is none."""
        job = self._jobs.get(job_id)
        if job is None or not job.result or not secrets.compare_digest(job.token.encode(), token.encode()):
            return None
        return job.owner, len(job.result[0]), job.result[0][first:end]

    def _note(self, job: _Job, update: Update, result: list[bytes]) -> None:
        if job.ended:
            return
        job.last_seen = time.monotonic()
        if update.status != "LOG":
            job.latest = Update(update.id, update.status, update.description)
            job.result = result
        if listener := self._listeners.get(job.listener or ""):
            listener.updates.append(update)
            listener.news.set()

    def _sweep(self) -> None:
        """Remove expired listeners and jobs, fail jobs without heartbeats, and limit the results' bytes."""
        now = time.monotonic()
        for name, listener in list(self._listeners.items()):
            if now - listener.last_seen > LISTENER_TIMEOUT_S:
                del self._listeners[name]
        for name, job in list(self._jobs.items()):
            if job.ended and now - job.last_seen > KEEP_S:
                del self._jobs[name]
            elif not job.ended and now - job.last_seen > JOB_TIMEOUT_S:
                self._note(job, Update(name, "ERROR", "the replica that ran the job has ended: send the job again"), [])
        held = Counter[str | None]()
        for job in self._jobs.values():
            held[job.owner] += sum(map(len, job.result))
        while held.total() > RESULTS_BYTES:
            [(most, _)] = held.most_common(1)
            name, job = next((name, job) for name, job in self._jobs.items() if job.owner == most and job.result)
            held[most] -= sum(map(len, job.result))
            job.result = []
            job.latest = Update(
                name, "ERROR", "its result was removed to make room for others before it was fetched: run the job again"
            )


def connect() -> Any:
    """The handle of the cluster's board, an actor on the head node; started by the first call."""
    return detached(Board, "clients' jobs", max_concurrency=10_000, resources=ON_HEAD).remote()
