"""The processes of clients' jobs, and the host process that forks them."""

from __future__ import annotations

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
from dataclasses import asdict
from struct import Struct

from deployments.client_code.execution import JobModel
from deployments.client_code.execution import run as run_job
from deployments.client_code.job import CodeJob, Kind, Limits, receive, send
from deployments.client_code.kernel import PR_SET_CHILD_SUBREAPER, call
from deployments.client_code.sandbox import Sandbox

logger = logging.getLogger("ray.serve")

PID = Struct("<i")
WARM_S = 120.0  # the longest time to load the libraries
FORK_S = 10.0  # the longest time to fork
# Environment variables to pass on: client code must not see the server's keys and addresses.
KEPT_VARIABLES = ["PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH"]
KEPT_VARIABLES += ["HF_HOME", "HF_MODULES_CACHE", "HF_HUB_OFFLINE"]


def sandbox(gpu: bool) -> Sandbox:
    """The strongest sandbox of this system, determined in a separate process.

    Args:
        gpu: Whether the weights are on a GPU.

    Raises:
        RuntimeError: It cannot be determined, or none works.
    """
    command = [sys.executable, "-m", "deployments.client_code.sandbox", "gpu" if gpu else "cpu"]
    done = subprocess.run(command, env=_environment(), stdin=subprocess.DEVNULL, capture_output=True, timeout=WARM_S)
    if done.returncode:
        raise RuntimeError(f"no sandbox works for clients' code: {done.stderr.decode(errors='replace')[-1000:]}")
    return Sandbox(**json.loads(done.stdout))


def _environment() -> dict[str, str]:
    kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    return kept | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TOKENIZERS_PARALLELISM": "false"}


class JobProcesses:
    """Starts processes for jobs over one model. Its methods block, and may be called from any thread."""

    def __init__(self, model: JobModel) -> None:
        """Start the host in the background."""
        self._model = model
        self._lock = threading.Lock()  # around the host, whose answers come in the order of requests
        self._host: _Host | None = None
        threading.Thread(target=self._warm, name="client-code", daemon=True).start()

    def start(self, job: CodeJob, limits: Limits) -> JobProcess:
        """Fork a job's process and send it the job.

        Raises:
            OSError: No host can fork.
            EOFError: The hosts end instead.
        """
        asked = {"limits": asdict(limits), "env": job.env, "compress": job.compress}
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                pid = self._fork(theirs)
        except BaseException:  # close, then re-raise
            ours.close()
            raise
        process = JobProcess(pid, ours)
        try:
            send(ours, Kind.JOB, json.dumps(asked).encode())
            send(ours, Kind.BLOCK, job.blob)
        except OSError:  # it has already ended; its listener gets the error
            logger.warning("the process of job %s ended at once", job.id)
        return process

    def close(self) -> None:
        """End the host and every job."""
        with self._lock:
            self._end_host()

    def _warm(self) -> None:
        try:
            with self._lock:
                self._ready_host()
        except Exception:  # this thread has no caller: the first job starts another host, or fails with the reason
            logger.exception("clients' code cannot be run yet: its host process did not start")

    def _fork(self, to: socket.socket) -> int:
        with self._lock:
            try:
                return self._ready_host().fork(to)
            except (OSError, EOFError):
                logger.warning("the host process of clients' jobs does not fork and is replaced", exc_info=True)
                self._end_host()  # late answers would be taken for those of other requests
            try:
                return self._ready_host().fork(to)
            except (OSError, EOFError):
                self._end_host()
                raise

    def _ready_host(self) -> _Host:
        if self._host is None or not self._host.alive:
            self._end_host()
            self._host = _Host(self._model)
        return self._host

    def _end_host(self) -> None:
        if self._host is not None:
            self._host.close()
            self._host = None


class JobProcess:
    """The process of one job; `socket` is the connection to it."""

    def __init__(self, pid: int, to: socket.socket) -> None:
        self.socket = to
        self._pid = pid

    def kill(self) -> None:
        """Kill it and all processes in its group.

        The number is not reused while a group has it. Afterwards it is free, but this call comes long before the
        numbers wrap around.
        """
        for end in (os.killpg, os.kill):  # it may not have a group yet
            with contextlib.suppress(ProcessLookupError):
                end(self._pid, signal.SIGKILL)


class _Host:
    """The process that forks jobs."""

    def __init__(self, model: JobModel) -> None:
        self._control, theirs = socket.socketpair()
        self._control.settimeout(WARM_S)
        weights = model.weights.fd
        command = [sys.executable, "-m", "deployments.client_code.processes", str(theirs.fileno()), str(weights)]
        with theirs:
            self._process = subprocess.Popen(
                command, env=_environment(), pass_fds=(theirs.fileno(), weights), stdin=subprocess.DEVNULL
            )
        try:
            send(self._control, Kind.JOB, pickle.dumps(model))
            receive(self._control)
        except BaseException:  # close, then re-raise
            self.close()
            raise
        self._control.settimeout(FORK_S)

    @property
    def alive(self) -> bool:
        """Whether it can fork."""
        return self._process.poll() is None

    def fork(self, to: socket.socket) -> int:
        """Fork a process with this socket; returns its id."""
        socket.send_fds(self._control, [b"\0"], [to.fileno()])
        answer = self._control.recv(PID.size, socket.MSG_WAITALL)
        if len(answer) < PID.size:
            raise EOFError("the host process has ended")
        (pid,) = PID.unpack(answer)
        return int(pid)

    def close(self) -> None:
        """End it and all its jobs."""
        self._control.close()
        self._process.kill()
        self._process.wait()


def run_host(control: socket.socket, weights_fd: int) -> None:
    """Run the process that forks jobs: a job for each received socket, until the replica closes its end.

    It has the libraries and the tokenizer loaded, and runs no job itself. It has one thread, because other threads,
    such as OpenMP's, do not exist after a fork. It answers each socket with the id of the forked process.
    """
    import torch
    import transformers.pipelines.text_generation  # noqa: F401 - what nnsight wraps a model in: no job waits for it

    torch.set_num_threads(1)
    # The kernel reaps ended children, and jobs' processes whose parents have ended: process 1 may reap none.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    call("prctl", PR_SET_CHILD_SUBREAPER, 1)
    _, body = receive(control)
    model = pickle.loads(body)  # noqa: S301 - sent by the replica
    send(control, Kind.RUNNING, b"")
    while True:
        _, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not fds:
            return
        pid = os.fork()
        if pid == 0:
            control.close()
            run_job(socket.socket(fileno=fds[0]), model, weights_fd)  # does not return
        os.close(fds[0])
        control.sendall(PID.pack(pid))


if __name__ == "__main__":
    run_host(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
