"""Clients' code: finds the model of a job, sends the job there, and reads its status from the board of jobs."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable
from typing import Any

from deployments.activations.facts import Account
from deployments.client_code.job import CodeJob, ModelKey, Update
from deployments.options import Options
from serve_app.backend.model_registry import Models
from serve_app.backend.served_model import ServedModel
from serve_app.backend.waiting import answered
from serve_app.http.budget import Budget
from serve_app.http.errors import ApiError, render
from serve_app.http.ranges import whole

STAY_S = 10.0  # between signs of a listener's life
RESULTS_BYTES = 128 << 20  # of an owner's larger results that are sent at once; of one that is still larger, one
BOARD_S = 60.0  # the longest that the board's answer is waited for; a listener's is empty well before


class CodeJobs:
    """Sends clients' jobs to replicas, and asks the board of jobs about them."""

    def __init__(self, options: Options, models: Models, board: Any) -> None:
        """Initialize with no jobs.

        Args:
            options: The operator's.
            models: The models that are served.
            board: The board's handle.
        """
        self._models = models
        self._board = board
        self._public_url = options.public_url
        self._sent_at_once = defaultdict[str | None, Budget](lambda: Budget(RESULTS_BYTES))  # by owner
        self._sent: set[asyncio.Task[None]] = set()  # asyncio itself holds tasks by weak references

    async def send(
        self, key: ModelKey, block: bytes, compress: bool, env: dict[str, Any], listener: str, owner: str | None
    ) -> Update:
        """Send a block to its model's replicas; what is to be said of it at once.

        Raises:
            RequestError: Nobody listens by that name, or there are too many jobs.
            ApiError: 404, 503.
        """
        model = await self._models.of_repository(key.repo_id)
        job_id: str = await _from_board(self._board.open.remote(listener or None, owner))
        job = CodeJob(job_id, block, compress, env, key, bool(listener))
        task = asyncio.ensure_future(self._run(model, job))
        self._sent.add(task)
        task.add_done_callback(self._sent.discard)
        return Update(job_id, "RECEIVED")

    async def _run(self, model: ServedModel, job: CodeJob) -> None:
        try:
            await model.run_code(job)
        except Exception as error:  # noqa: BLE001 - this task has no caller: the client gets the error from the board
            message = render(error, job.id).message
            await _from_board(self._board.post.remote([Update(job.id, "ERROR", message)], []))

    async def listen(self, owner: str | None) -> str:
        """A new listener's name.

        Args:
            owner: Who listens; None without API keys.

        Raises:
            RequestError: There are too many.
        """
        return await _from_board(self._board.listen.remote(owner))  # type: ignore[no-any-return]

    async def updates(self, listener: str) -> list[Update]:
        """The updates that a listener has not received; may be none, after a while."""
        return await _from_board(self._board.updates.remote(listener))  # type: ignore[no-any-return]

    async def stay(self, listener: str) -> None:
        """Give the board signs of a listener's life, without end."""
        while True:
            await _from_board(self._board.listens.remote(listener))
            await asyncio.sleep(STAY_S)

    async def leave(self, listener: str) -> None:
        """A listener has gone; its jobs are stopped."""
        await _from_board(self._board.leave.remote(listener))

    async def status(self, account: Account, job_id: str, base_url: str) -> dict[str, Any]:
        """What became of a job last, with the address of its result where there is one.

        Args:
            account: Who asks.
            job_id: The job.
            base_url: The server's address as the client's request says it.

        Raises:
            ApiError: 410, also where it is another's, or there never was such a job: nnsight takes 404 for one that has
                not begun; 503.
        """
        found: tuple[Update, str | None] | None = await _from_board(self._board.latest.remote(job_id, account))
        if found is None:
            raise ApiError(410, f"there is no job {job_id[:64]!r} (any more)", "job_id", "job_not_found")
        update, token = found
        if token is None:
            return update.as_json
        base = (self._public_url or base_url).rstrip("/")
        return update.as_json | {"data": f"{base}/response/{job_id}/result?token={token}"}

    async def result(self, job_id: str, token: str) -> tuple[int, AsyncGenerator[bytes]]:
        """The length of a finished job's result, and its bytes, which wait while others that are large are sent.

        Raises:
            ApiError: 404; 503.
        """
        owner, length, _ = await self._piece(job_id, token, 0, 0)

        async def read(first: int, end: int) -> bytes:
            return (await self._piece(job_id, token, first, end))[2]

        return length, whole(read, length, self._sent_at_once[owner])

    async def _piece(self, job_id: str, token: str, first: int, end: int) -> tuple[str | None, int, bytes]:
        found: tuple[str | None, int, bytes] | None
        found = await _from_board(self._board.result.remote(job_id, token, first, end))
        if found is None:
            raise ApiError(404, "there is no such result (any more)", "job_id", "result_not_found")
        return found


async def _from_board(asked: Awaitable[Any]) -> Any:
    return await answered(asked, "the board of clients' jobs", BOARD_S)
