"""Clients' code: sends a job to its model's replicas, and reads its status from the job board."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable
from typing import Any

from deployments.accounts import Account
from deployments.client_code.job import CodeJob, ModelKey, Update
from deployments.options import Options
from serve_app.backend.model_registry import Models
from serve_app.backend.served_model import ServedModel
from serve_app.http.errors import ApiError, render, within
from serve_app.http.paging import Budget, whole

STAY_S = 10.0  # between signals that a listener is connected
RESULTS_BYTES = 128 << 20  # of an owner's large results sent at once; a result larger than this is sent alone
BOARD_S = 60.0  # the longest wait for the board; its answer to a listener without updates comes well before


class CodeJobs:
    """Sends clients' jobs to replicas, and reads their status from the job board."""

    def __init__(self, options: Options, models: Models, board: Any) -> None:
        """Initialize without jobs.

        Args:
            options: The operator's options.
            models: The served models.
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
        """Send a block to its model's replicas, and return its first status.

        Raises:
            RequestError: There is no such listener, or there are too many jobs.
            ApiError: 404, 503.
        """
        model = await self._models.of_repository(key.repo_id, str(env.get("peft") or ""))
        job_id: str = await _from_board(self._board.open.remote(listener or None, owner))
        job = CodeJob(job_id, block, compress, env, key, bool(listener), owner)
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

    async def finish(self) -> None:
        """Wait for the jobs that this process sent, which would end with it."""
        while self._sent:
            await asyncio.wait(self._sent)

    async def listen(self, owner: str | None) -> str:
        """Open a listener and return its name.

        Args:
            owner: The listener's owner; None without API keys.

        Raises:
            RequestError: There are too many.
        """
        return await _from_board(self._board.listen.remote(owner))  # type: ignore[no-any-return]

    async def updates(self, listener: str) -> list[Update]:
        """Wait for updates that a listener has not received; none after a timeout."""
        return await _from_board(self._board.updates.remote(listener))  # type: ignore[no-any-return]

    async def stay(self, listener: str) -> None:
        """Report to the board that a listener is connected, until cancelled."""
        while True:
            await _from_board(self._board.listens.remote(listener))
            await asyncio.sleep(STAY_S)

    async def leave(self, listener: str) -> None:
        """Close a listener; its jobs are stopped."""
        await _from_board(self._board.leave.remote(listener))

    async def status(self, account: Account, job_id: str, base_url: str) -> dict[str, Any]:
        """The last status of a job, with the address of its result if there is one.

        Args:
            account: The caller's account.
            job_id: The job.
            base_url: The server's address in the client's request.

        Raises:
            ApiError: 410 for an unknown or expired job and one of another owner, because nnsight reads 404 as a job
                that has not started; 503.
        """
        latest: tuple[Update, str | None] | None = await _from_board(self._board.latest.remote(job_id, account))
        if latest is None:
            raise ApiError(410, f"job {job_id[:64]!r} is unknown or has expired", "job_id", "job_not_found")
        update, token = latest
        if token is None:
            return update.as_json
        base = (self._public_url or base_url).rstrip("/")
        return update.as_json | {"data": f"{base}/response/{job_id}/result?token={token}"}

    async def result(self, job_id: str, token: str) -> tuple[int, AsyncGenerator[bytes]]:
        """The length and bytes of a finished job's result; a large one waits while other large ones are sent.

        Raises:
            ApiError: 404; 503.
        """
        owner, length, _ = await self._piece(job_id, token, 0, 0)

        async def read(first: int, end: int) -> bytes:
            return (await self._piece(job_id, token, first, end))[2]

        return length, whole(read, length, self._sent_at_once[owner])

    async def _piece(self, job_id: str, token: str, first: int, end: int) -> tuple[str | None, int, bytes]:
        piece: tuple[str | None, int, bytes] | None
        piece = await _from_board(self._board.result.remote(job_id, token, first, end))
        if piece is None:
            raise ApiError(404, "this result is unknown or has expired", "job_id", "result_not_found")
        return piece


async def _from_board(call: Awaitable[Any]) -> Any:
    async with within(BOARD_S, 503, "the board of clients' jobs does not answer; try again"):
        return await call
