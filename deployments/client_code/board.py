"""Every client's job and what became of it, in one named actor.

A client's socket and its requests may reach different ingresses, and its job another node.
"""

from __future__ import annotations

import asyncio
import secrets
import time
import uuid
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from deployments.activations.facts import OPERATOR, Account
from deployments.client_code.job import LAST, Update
from deployments.clusters import ON_HEAD, detached
from deployments.errors import RequestError

MOST_JOBS = 1024  # that are known at once; of who has most that have ended, the oldest makes room for a new one
MOST_LISTENERS = 1024
MAX_PENDING_UPDATES = 10_000  # updates that wait for a listener; the oldest go
KEEP_S = 3600.0  # for which what became of a job is known
JOB_TIMEOUT_S = 30.0  # without a sign of life from the replica after which a job is lost
POLL_S = 20.0  # the longest that a listener's call waits
LISTENER_TIMEOUT_S = 60.0  # without a sign of life from its ingress after which a listener has gone
RESULTS_BYTES = 1 << 30  # of all results together; of who holds most, the oldest make room for new ones

_NOBODY = "nobody listens by this id: subscribe first", "session_id", "session_not_found", 404


@dataclass(eq=False)
class _Job:
    latest: Update
    listener: str | None
    owner: str | None  # who sent it
    last_seen: float  # when its replica last reported, or it ended
    result: list[bytes] = field(default_factory=list)
    token: str = field(default_factory=secrets.token_urlsafe)  # who fetches the result shows it

    @property
    def ended(self) -> bool:
        return self.latest.status in LAST


@dataclass(eq=False)
class _Listener:
    owner: str | None
    updates: deque[Update] = field(default_factory=lambda: deque(maxlen=MAX_PENDING_UPDATES))
    news: asyncio.Event = field(default_factory=asyncio.Event)
    last_seen: float = field(default_factory=time.monotonic)  # when its ingress last asked


class Board:
    """Jobs by their ids, and who listens to what becomes of them."""

    def __init__(self) -> None:
        self._jobs: dict[str, _Job] = {}
        self._listeners: dict[str, _Listener] = {}

    async def listen(self, owner: str | None = None) -> str:
        """A new listener's id.

        Args:
            owner: Who listens; None without API keys.

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
        """The updates that a listener has not received; waits a while for some, and may return none.

        Raises:
            RequestError: There is no such listener.
        """
        if listener not in self._listeners:
            raise RequestError(*_NOBODY)
        found = self._listeners[listener]
        self._sweep()
        try:
            async with asyncio.timeout(POLL_S):
                await found.news.wait()
        except TimeoutError:
            return []
        gathered = list(found.updates)
        found.updates.clear()
        found.news.clear()
        return gathered

    async def listens(self, listener: str) -> None:
        """Note that a listener is still connected."""
        self._sweep()
        if found := self._listeners.get(listener):
            found.last_seen = time.monotonic()

    async def leave(self, listener: str) -> None:
        """A listener has gone; nobody waits for its jobs."""
        self._listeners.pop(listener, None)

    async def open(self, listener: str | None, owner: str | None = None) -> str:
        """A new job's id.

        Args:
            listener: The socket that gets its updates; None if its client polls.
            owner: Who sends it; None without API keys.

        Raises:
            RequestError: There is no such listener of the owner's, or there are too many jobs.
        """
        self._sweep()
        if listener is not None and (listener not in self._listeners or self._listeners[listener].owner != owner):
            raise RequestError(*_NOBODY)
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
        """Something becomes of jobs.

        Args:
            updates: What it is, in order.
            result: A finished job's result, where it is to be fetched.
        """
        for update in updates:
            job = self._jobs.get(update.id)
            if job is not None:
                self._note(job, update, result)

    async def heartbeat(self, job_id: str) -> bool:
        """A replica works on a job; whether anybody waits for it."""
        job = self._jobs.get(job_id)
        if job is None or job.ended or (job.listener is not None and job.listener not in self._listeners):
            return False
        job.last_seen = time.monotonic()
        return True

    async def latest(self, job_id: str, account: Account = OPERATOR) -> tuple[Update, str | None] | None:
        """What became of a job last, and its result's token where there is one to fetch.

        None where there is no job that is the account's.
        """
        self._sweep()
        job = self._jobs.get(job_id)
        if job is None or not account.may_change(job.owner):
            return None
        return job.latest, job.token if job.result else None

    async def result(self, job_id: str, token: str, first: int, end: int) -> tuple[str | None, int, bytes] | None:
        """A finished job's owner, the length of its result, and its bytes from `first` to `end`; None where none is."""
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
        """Forget what is old, and give up who gives no sign of life."""
        now = time.monotonic()
        for name, listener in list(self._listeners.items()):
            if now - listener.last_seen > LISTENER_TIMEOUT_S:
                del self._listeners[name]
        for name, job in list(self._jobs.items()):
            if job.ended and now - job.last_seen > KEEP_S:
                del self._jobs[name]
            elif not job.ended and now - job.last_seen > JOB_TIMEOUT_S:
                self._note(job, Update(name, "ERROR", "the replica that ran the job has gone: send it again"), [])
        held = Counter[str | None]()
        for job in self._jobs.values():
            held[job.owner] += sum(map(len, job.result))
        while held.total() > RESULTS_BYTES:
            [(most, _)] = held.most_common(1)
            name, job = next((name, job) for name, job in self._jobs.items() if job.owner == most and job.result)
            held[most] -= sum(map(len, job.result))
            job.result = []
            job.latest = Update(name, "ERROR", "its result made room for others before it was fetched")


def connect() -> Any:
    """A handle to the cluster's board: made by whoever asks first, on the head node, to end with the cluster."""
    return detached(Board, "clients' jobs", max_concurrency=10_000, resources=ON_HEAD).remote()
