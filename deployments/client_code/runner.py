"""Runs clients' code for a replica: one job after another, each in a process that is killed at its limits."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

import torch
from nnsight.schema.response import ResponseModel, Status
from ray.exceptions import RayError

from deployments.client_code.board import connect
from deployments.client_code.execution import JobModel
from deployments.client_code.job import HEAD, CodeJob, Kind, Limits, Update
from deployments.client_code.processes import JobProcess, JobProcesses, sandbox
from deployments.client_code.sandbox import Sandbox
from deployments.errors import LoadError, RequestError
from deployments.exposure import is_loopback
from deployments.model.model import Model, import_nnsight
from deployments.options import Options
from deployments.turns import Turns

import_nnsight()  # modules imported above import nnsight, which gives all objects a `.save`; this call removes it

logger = logging.getLogger("ray.serve")

LOG_BYTES = 1 << 20  # that a job may print
RESULT_SHARE = 16  # a result may have this part of a job's memory
MOST_WAITING = 8  # jobs of an owner at a replica
STREAMED_BYTES = 1 << 20  # a result up to this size is sent with its message; a larger one is fetched
HEARTBEAT_S = 1.0  # between heartbeats to the board, which answers whether a client waits
LOST_S = 30.0  # without the board's answer after which no client is assumed to wait
BOARD_S = 30.0  # the longest wait for the board
GRACE_S = 5.0  # after the time limit, for the job to report where it was: others may want the processor
SET_UP_S = 60.0  # before the time limit starts: mapping the model
ENDED = (
    "the job's process ended without a report: it crashed, or it was killed, as the kernel does when memory runs out"
)


def runner(options: Options, model: Model, host: str | None) -> CodeRunner:
    """The runner of clients' jobs for a model.

    Args:
        options: The operator's options.
        model: The model, loaded with `share`.
        host: The address that Serve's proxies listen on; None for all of them.

    Raises:
        LoadError: Other machines can reach the server, and this system cannot isolate jobs.
    """
    assert model.shared is not None
    job_model = JobModel(model.shared, model.tokenizer, _sandbox(options, model.shared.on_gpu, host))
    limits = Limits(
        seconds=options.client_code_timeout_s,
        memory_bytes=options.client_code_memory_bytes,
        result_bytes=options.client_code_memory_bytes // RESULT_SHARE,
        log_bytes=LOG_BYTES,
        threads=max(1, torch.get_num_threads() // 2),
    )
    return CodeRunner(options, job_model, connect(), limits)


def _sandbox(options: Options, gpu: bool, host: str | None) -> Sandbox:
    if options.client_code_sandbox == "none":
        logger.warning("clients' code runs without a sandbox, as this server's user (client_code_sandbox=none)")
        return Sandbox()
    try:
        best = sandbox(gpu)
    except RuntimeError as error:
        message = f"{error}; to run it without a sandbox, as this server's user, set client_code_sandbox=none"
        raise LoadError(message, "client_code_sandbox", "client_code_not_isolated", 500) from error
    if not best.isolates and not is_loopback(host):
        message = (
            f"this system cannot isolate clients' code ({best}), and HTTP listens on {host or 'all addresses'}: run "
            "as root or allow unprivileged user namespaces (in a container, with CAP_SYS_ADMIN or a seccomp profile "
            "that lets unshare and mount pass), have the server listen on 127.0.0.1, or, where everybody with a key "
            "of the role code may have this server's rights, set client_code_sandbox=none"
        )
        raise LoadError(message, "client_code_sandbox", "client_code_not_isolated", 500)
    logger.info("layers of the sandbox for clients' code: %s", best)
    return best


class CodeRunner:
    """Runs clients' jobs on one model's weights, in parallel with the engine."""

    def __init__(self, options: Options, model: JobModel, board: Any, limits: Limits) -> None:
        """Start the process that jobs are forked from; `board` is the handle of the `Board` that gets their updates."""
        self._options = options
        self._processes = JobProcesses(model)
        self._board = board
        self._limits = limits
        self._turns = Turns("jobs", MOST_WAITING)

    async def run(self, job: CodeJob) -> None:
        """Run a job to its end and send its updates to the board; the caller need not wait.

        Raises:
            RequestError: It needs another revision or the repository's own code, or too many of its owner's jobs wait.
        """
        self._check(job)
        with self._turns.place(job.owner):
            async with _alive(self._board, job) as gone:
                await self._send(Update(job.id, "QUEUED", f"{self._turns.held.total() - 1} jobs wait or run"))
                async with _turn(self._turns, job.owner, gone) as comes:
                    if comes:
                        await self._send(Update(job.id, "DISPATCHED"))
                        await self._run(job, gone)

    def _check(self, job: CodeJob) -> None:
        served = self._options.revision
        if job.key.revision not in (None, served) and {job.key.revision, served} != {"main", None}:
            message = f"the revision {job.key.revision!r} is not served here: {served or 'main'!r} is"
            raise RequestError(message, "model_key", "revision_not_served", 404)
        if job.key.trust_remote_code and not self._options.trust_remote_code:
            message = "the model is served without its repository's own code: make yours without trust_remote_code"
            raise RequestError(message, "model_key", "remote_code_not_allowed")

    def close(self) -> None:
        """End the host and every job."""
        self._processes.close()

    async def _send(self, *updates: Update, result: bytes | None = None) -> None:
        async with asyncio.timeout(BOARD_S):
            await self._board.post.remote(list(updates), [result] if result is not None else [])

    async def _run(self, job: CodeJob, gone: asyncio.Event) -> None:
        try:
            process = await asyncio.to_thread(self._processes.start, job, self._limits)
        except (OSError, EOFError) as error:
            await self._send(
                Update(job.id, "ERROR", f"the job's process did not start: {type(error).__name__}: {error}")
            )
            return
        begun = asyncio.Event()
        talk = asyncio.ensure_future(self._listen(job, process, begun))
        tasks = [talk, asyncio.ensure_future(gone.wait()), asyncio.ensure_future(self._late(begun))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            late = tasks[-1].done() and not talk.done()
        finally:
            process.kill()
            if not talk.done():
                talk.cancel()
            for task in tasks[1:]:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if late:
            message = f"TimeoutError: the job did not stop at the server's limit of {self._limits.seconds:g} s"
            await self._send(Update(job.id, "ERROR", message))
        elif not talk.cancelled():
            talk.result()

    async def _late(self, begun: asyncio.Event) -> None:
        """Wait until a job should have ended."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SET_UP_S):
                await begun.wait()
        await asyncio.sleep(self._limits.seconds + GRACE_S)

    async def _listen(self, job: CodeJob, process: JobProcess, begun: asyncio.Event) -> None:
        """Pass on a job's messages until the last one; set `begun` when its time starts."""
        reader, writer = await asyncio.open_connection(sock=process.socket)
        updates: asyncio.Queue[Update] = asyncio.Queue()  # bounded by the limit on printed text
        passing = asyncio.ensure_future(self._pass_on(updates))
        try:
            try:
                last, result = await self._last_word(job, reader, updates, begun)
            except (asyncio.IncompleteReadError, ConnectionError, ValueError):
                last, result = Update(job.id, "ERROR", ENDED), None
            await updates.join()
        finally:
            passing.cancel()
            writer.close()
        await self._send(last, result=result)

    async def _last_word(
        self, job: CodeJob, reader: asyncio.StreamReader, updates: asyncio.Queue[Update], begun: asyncio.Event
    ) -> tuple[Update, bytes | None]:
        """A job's last update, and its result if it is to be fetched; earlier updates go to `said`."""
        left = 2 * self._limits.log_bytes
        while True:
            kind, body = await self._frame(reader)
            left -= HEAD.size + len(body)
            if kind is Kind.DONE and not (job.stream and len(body) <= STREAMED_BYTES):
                return Update(job.id, "COMPLETED"), body
            if kind is Kind.DONE:
                response = ResponseModel(id=job.id, status=Status.COMPLETED, data=body)
                return Update(job.id, "COMPLETED", frame=response.pickle()), None
            if kind is Kind.FAILED:
                return Update(job.id, "ERROR", body.decode(errors="replace")), None
            if kind is Kind.RUNNING:
                begun.set()
            if left < 0:
                raise ValueError("the job's process printed more than its limit")
            updates.put_nowait(Update(job.id, "LOG" if kind is Kind.LOG else "RUNNING", body.decode(errors="replace")))

    async def _pass_on(self, updates: asyncio.Queue[Update]) -> None:
        """Send updates to the board; those that arrive meanwhile are sent together."""
        while True:
            gathered = [await updates.get()]
            while not updates.empty():
                gathered.append(updates.get_nowait())
            try:
                await self._send(*gathered)
            except (RayError, TimeoutError):  # these are lost, but the job must not wait for them until its limit
                logger.warning("the board of clients' jobs does not answer", exc_info=True)
            for _ in gathered:
                updates.task_done()

    async def _frame(self, reader: asyncio.StreamReader) -> tuple[Kind, bytes]:
        kind, length = HEAD.unpack(await reader.readexactly(HEAD.size))
        if length > (self._limits.result_bytes if kind == Kind.DONE.value else self._limits.log_bytes):
            raise ValueError("the job's process sent more than its limit")
        return Kind(kind), await reader.readexactly(length)


@contextlib.asynccontextmanager
async def _turn(turns: Turns, owner: str | None, gone: asyncio.Event) -> AsyncIterator[bool]:
    """Wait for an owner's turn, or until no client waits for the job; yields whether the turn came."""
    waiting = [asyncio.ensure_future(turns.acquire(owner)), asyncio.ensure_future(gone.wait())]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        yield not gone.is_set()
    finally:
        for task in waiting:
            task.cancel()
        acquired, _ = await asyncio.gather(*waiting, return_exceptions=True)
        if acquired is None:
            turns.release()


@contextlib.asynccontextmanager
async def _alive(board: Any, job: CodeJob) -> AsyncIterator[asyncio.Event]:
    """Send heartbeats to the board; the event is set once no client waits for the job."""
    gone = asyncio.Event()

    async def beat() -> None:
        answered = time.monotonic()
        while time.monotonic() - answered < LOST_S:
            try:
                async with asyncio.timeout(LOST_S):
                    waits = await board.heartbeat.remote(job.id)
            except (RayError, TimeoutError):
                logger.warning("the board of clients' jobs does not answer", exc_info=True)
            else:
                answered = time.monotonic()
                if not waits:
                    break
            await asyncio.sleep(HEARTBEAT_S)
        gone.set()

    beating = asyncio.ensure_future(beat())
    try:
        yield gone
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
