"""Servers and load generators as child processes that never outlive the benchmark."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import httpx
import psutil

ROOT = Path(__file__).parents[2]


def output(command: Sequence[str], env: Mapping[str, str] | None = None, sent: str | None = None) -> str:
    """Run a command to its end and give what it wrote to stdout.

    Args:
        command: The command.
        env: Its environment; by default this process's.
        sent: What it reads from stdin.

    Raises:
        RuntimeError: It ended with another status than 0; with all that it wrote.
    """
    done = subprocess.run(command, cwd=ROOT, env=env, input=sent, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[:3]} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


@contextlib.contextmanager
def child(command: Sequence[str], env: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command in a session of its own; end the whole session on the way out, Ctrl-C included."""
    with log.open("wb") as out:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=out, start_new_session=True)
    try:
        yield process
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask the process group to end, and kill what is left of the session: Ray's workers have groups of their own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(30)
    for member in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.Error):
            if os.getsid(member.pid) == process.pid:
                member.kill()
    process.wait()


def until(ready: Callable[[], bool], process: subprocess.Popen[bytes], log: Path, limit_s: float = 300) -> None:
    """Wait until a child is ready.

    Raises:
        RuntimeError: It ended, or was not ready in time; with the end of its log.
    """
    deadline = time.monotonic() + limit_s
    while not ready():
        if process.poll() is not None:
            raise RuntimeError(f"it ended with {process.returncode}:\n{_tail(log)}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"it was not ready after {limit_s:.0f} s:\n{_tail(log)}")
        time.sleep(0.2)


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-3000:]


def answers(url: str) -> bool:
    """Whether a GET gives 200."""
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.TransportError:
        return False
