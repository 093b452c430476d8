"""Host processes of jobs that are forked from one with all libraries loaded, as each takes seconds to load them."""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.client_code import processes
from deployments.client_code.processes import PID


class ForkedHost:
    """A host as `subprocess.Popen` gives it, whose parent is another process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._handle = os.pidfd_open(pid)

    def poll(self) -> int | None:
        return self._ended(0)

    def wait(self) -> int | None:
        return self._ended(None)

    def kill(self) -> None:
        if self.poll() is None:
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    def _ended(self, limit_ms: int | None) -> int | None:
        poll = select.poll()
        poll.register(self._handle, select.POLLIN)
        return -signal.SIGKILL if poll.poll(limit_ms) else None

    def __del__(self) -> None:
        os.close(self._handle)


@pytest.fixture(scope="module")
def forked_hosts() -> Iterator[None]:
    """Hosts start as in a server, but for the loading: tests of serve_app that run code start whole ones."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, str(Path(__file__).with_name("forking_hosts.py")), str(theirs.fileno())]
    with theirs:
        forking = subprocess.Popen(
            command, env=processes._environment(), pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL
        )
    lock = threading.Lock()

    def fork(command: list[str], *, pass_fds: tuple[int, int], **_: Any) -> ForkedHost:
        assert command[1:] == ["-m", "deployments.client_code.processes", *map(str, pass_fds)]
        mask = re.search(r"^Umask:\s*(\d+)", Path("/proc/self/status").read_text(), re.MULTILINE)
        with lock:
            socket.send_fds(ours, [PID.pack(int(mask[1], 8))], pass_fds)  # as a host has its server's
            (pid,) = PID.unpack(ours.recv(PID.size, socket.MSG_WAITALL))
            return ForkedHost(pid)

    with pytest.MonkeyPatch.context() as patch, ours:
        patch.setattr(
            processes, "subprocess", SimpleNamespace(Popen=fork, run=subprocess.run, DEVNULL=subprocess.DEVNULL)
        )
        yield
    forking.kill()  # its end by itself takes seconds
    forking.wait()
