"""The replica's side of clients' code: one job after the other, each in a process that is stopped when it must be."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

import torch
from nnsight.schema.response import ResponseModel, Status

from deployments.client_code.board import connect
from deployments.client_code.execution import JobModel
from deployments.client_code.host import PID
from deployments.client_code.job import CodeJob, Limits, Update
from deployments.client_code.wire import HEAD, Kind, receive, send
from deployments.engine.model import Model
from deployments.errors import RequestError
from deployments.options import Options

logger = logging.getLogger("ray.serve")

LOG_BYTES = 1 << 20  # that a job may print
STREAMED_BYTES = 1 << 20  # a result of at most so many goes with its message; a larger one is fetched
HEARTBEAT_S = 1.0  # between signs of life to the board, which says whether anybody waits
MERCY_S = 2.0  # after its time a job may still say where it was
WARM_S = 120.0  # within which the host has its libraries loaded
# Of the environment: the server's keys and addresses are no business of a client's code.
KEPT = ["PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH"]
KEPT += ["HF_HOME", "HF_MODULES_CACHE", "HF_HUB_OFFLINE"]
ENDED = (
    "the job's process ended without a word: it was killed, as the kernel does where the machine's memory ends, or "
    "it crashed"
)


def runner(options: Options, model: Model) -> CodeRunner:
    """What runs clients' jobs over a model.

    Args:
        options: The operator's.
        model: Loaded to be shared.
    """
    assert model.shared is not None
    limits = Limits(
        seconds=options.client_code_timeout_s,
        memory_bytes=options.client_code_memory_bytes,
        result_bytes=options.client_code_result_bytes,
        log_bytes=LOG_BYTES,
        threads=options.client_code_threads or max(1, torch.get_num_threads() // 2),
    )
    return CodeRunner(options, JobModel(model.shared, model.tokenizer), connect(), limits)


class CodeRunner:
    """Runs clients' jobs over one model's weights, beside the engine."""

    def __init__(self, options: Options, model: JobModel, board: Any, limits: Limits) -> None:
        """Start the process that jobs are forked from.

        Args:
            options: The operator's.
            model: What they run on.
            board: The board's handle, which is told what becomes of them.
            limits: What one job may take.
        """
        self._options = options
        self._model = model
        self._board = board
        self._limits = limits
        self._waiting = 0
        self._turn = asyncio.Lock()
        self._lock = threading.Lock()  # around the host: its answers come in the order of questions
        self._host: _Host | None = None
        threading.Thread(target=self._warm, name="client-code", daemon=True).start()

    async def run(self, job: CodeJob) -> None:
        """Run a job to its end, and tell the board what becomes of it; the caller need not wait.

        Raises:
            RequestError: It is of another revision or of the repository's own code, or too many wait already.
        """
        self._check(job)
        if self._waiting > self._options.max_client_jobs:
            raise RequestError(f"{self._waiting} jobs are here already: try again later", None, "server_busy", 429)
        self._waiting += 1
        try:
            async with _alive(self._board, job) as gone:
                await self._tell(Update(job.id, "QUEUED", f"{self._waiting - 1} jobs before it"))
                async with self._turn:
                    if not gone.is_set():
                        await self._tell(Update(job.id, "DISPATCHED"))
                        await self._run(job, gone)
        finally:
            self._waiting -= 1

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
        with self._lock:
            if self._host is not None:
                self._host.close()
                self._host = None

    async def _tell(self, *updates: Update, result: bytes | None = None) -> None:
        await self._board.tell.remote(list(updates), [result] if result is not None else [])

    async def _run(self, job: CodeJob, gone: asyncio.Event) -> None:
        try:
            process = await asyncio.to_thread(self._start, job)
        except OSError as error:
            await self._tell(Update(job.id, "ERROR", f"the job's process did not start: {error}"))
            return
        limit = self._limits.seconds + MERCY_S
        talk = asyncio.ensure_future(self._listen(job, process))
        given_up = asyncio.ensure_future(gone.wait())
        try:
            done, _ = await asyncio.wait({talk, given_up}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                message = f"TimeoutError: the job did not stop at the server's limit of {self._limits.seconds:g} s"
                await self._tell(Update(job.id, "ERROR", message))
            elif talk in done:
                await talk
        finally:
            process.kill()
            for task in (talk, given_up):
                task.cancel()
            await asyncio.gather(talk, given_up, return_exceptions=True)

    async def _listen(self, job: CodeJob, process: _Process) -> None:
        """Pass on what a job says until its last word."""
        reader, writer = await asyncio.open_connection(sock=process.socket)
        said: asyncio.Queue[Update] = asyncio.Queue()  # bounded by what a job may print
        passing = asyncio.ensure_future(self._pass_on(said))
        try:
            try:
                last, result = await self._last_word(job, reader, said)
            except (asyncio.IncompleteReadError, ConnectionError, ValueError):
                last, result = Update(job.id, "ERROR", ENDED), None
            await said.join()
        finally:
            passing.cancel()
            writer.close()
        await self._tell(last, result=result)

    async def _last_word(
        self, job: CodeJob, reader: asyncio.StreamReader, said: asyncio.Queue[Update]
    ) -> tuple[Update, bytes | None]:
        """What a job says at its end, and its result where that is to be fetched; the rest goes to `said`."""
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
            if left < 0:
                raise ValueError("the job's process prints more than it may")
            said.put_nowait(Update(job.id, "LOG" if kind is Kind.LOG else "RUNNING", body.decode(errors="replace")))

    async def _pass_on(self, said: asyncio.Queue[Update]) -> None:
        """Tell the board what gathers while it is being told."""
        while True:
            gathered = [await said.get()]
            while not said.empty():
                gathered.append(said.get_nowait())
            await self._tell(*gathered)
            for _ in gathered:
                said.task_done()

    async def _frame(self, reader: asyncio.StreamReader) -> tuple[Kind, bytes]:
        kind, length = HEAD.unpack(await reader.readexactly(HEAD.size))
        if length > max(self._limits.result_bytes, self._limits.log_bytes) + HEAD.size:
            raise ValueError("the job's process sends more than it may")
        return Kind(kind), await reader.readexactly(length)

    # ---- the host

    def _warm(self) -> None:
        try:
            with self._lock:
                self._ready_host()
        except (OSError, EOFError):
            logger.exception("clients' code cannot be run yet: its host process did not start")

    def _start(self, job: CodeJob) -> _Process:
        """Fork a job's process and send it the job."""
        asked = {"limits": asdict(self._limits), "env": job.env, "compress": job.compress}
        ours, theirs = socket.socketpair()
        try:
            with self._lock, theirs:
                pid = self._ready_host().fork(theirs)
        except (OSError, EOFError) as error:
            ours.close()
            self.close()  # its answers may come late, and belong to other questions
            raise OSError(f"{type(error).__name__}: {error}") from error
        process = _Process(pid, ours)
        try:
            send(ours, Kind.JOB, json.dumps(asked).encode())
            send(ours, Kind.BLOCK, job.blob)
        except OSError:  # it has ended already; who listens to it learns so
            logger.warning("the process of job %s ended at once", job.id)
        return process

    def _ready_host(self) -> _Host:
        if self._host is None or not self._host.alive:
            self._host = _Host(self._model)
        return self._host


class _Process:
    """A job's process, and the socket to it."""

    def __init__(self, pid: int, to: socket.socket) -> None:
        self.socket = to
        self._pid = pid
        self._handle = os.pidfd_open(pid)

    def kill(self) -> None:
        """End it and all it started in its group, if it has not ended."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):  # it may not have a group yet
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)
        os.close(self._handle)


class _Host:
    """The process that jobs are forked from."""

    def __init__(self, model: JobModel) -> None:
        self._control, theirs = socket.socketpair()
        self._control.settimeout(WARM_S)
        weights = model.weights.fd
        kept = {name: os.environ[name] for name in KEPT if name in os.environ}
        kept |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TOKENIZERS_PARALLELISM": "false"}
        command = [sys.executable, "-m", "deployments.client_code.host", str(theirs.fileno()), str(weights)]
        with theirs:
            self._process = subprocess.Popen(
                command, env=kept, pass_fds=(theirs.fileno(), weights), stdin=subprocess.DEVNULL
            )
        send(self._control, Kind.JOB, pickle.dumps(model))
        receive(self._control)

    @property
    def alive(self) -> bool:
        """Whether it can fork."""
        return self._process.poll() is None

    def fork(self, to: socket.socket) -> int:
        """Fork a process that holds a socket; its id."""
        socket.send_fds(self._control, [b"\0"], [to.fileno()])
        answer = self._control.recv(PID.size, socket.MSG_WAITALL)
        if len(answer) < PID.size:
            raise EOFError("the host process has ended")
        (pid,) = PID.unpack(answer)
        return int(pid)

    def close(self) -> None:
        """End it, and with it every job."""
        self._control.close()
        self._process.kill()
        self._process.wait()


@contextlib.asynccontextmanager
async def _alive(board: Any, job: CodeJob) -> AsyncIterator[asyncio.Event]:
    """Give the board signs of life; the event is set when nobody waits for the job any more."""
    gone = asyncio.Event()

    async def beat() -> None:
        while await board.heard.remote(job.id):
            await asyncio.sleep(HEARTBEAT_S)
        gone.set()

    beating = asyncio.ensure_future(beat())
    try:
        yield gone
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
