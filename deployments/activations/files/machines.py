"""Which machines write to a directory. On mounts whose locks hold within each machine only, no lock shows this.

Each machine that writes keeps a file in the directory, whose content changes every `BEAT_S` seconds.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Mapping
from pathlib import Path

from deployments.activations.facts import StoreError

BEAT_S = 2.0
WATCH_S = 10.0  # after which a file that has not changed is a leftover
_PREFIX = ".machine-"  # no session id begins with '.'
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # one for all containers of a machine, whose kernel keeps the locks

logger = logging.getLogger(__name__)


class Heartbeat:
    """Shows that this machine writes to a directory, until it is closed or garbage.

    Waits `WATCH_S` where another machine has left a file. StoreError if another machine writes there.
    """

    def __init__(self, root: Path, machine: str | None = None) -> None:
        self._file = root / f"{_PREFIX}{machine or _this_machine()}"
        self._counter = itertools.count()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        try:
            others = self._watch()
            self.beat()
            self._thread = threading.Thread(
                target=_beat, args=(weakref.ref(self), self._ended), name="heartbeat", daemon=True
            )
            self._thread.start()
            weakref.finalize(self, self._ended.set)
            self._compare(others)  # of two machines that start at the same moment, one at least sees the other
            for file in others:
                file.unlink(missing_ok=True)
        except OSError:  # as on a full disk: the runs that are there can be read, and new ones are refused
            logger.exception("cannot write to %s: writes by another machine would go undetected", root)

    def beat(self) -> None:
        """Change the file."""
        file = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            os.pwrite(file, f"{next(self._counter):012} {socket.gethostname()}\n".encode(), 0)
        finally:
            os.close(file)  # over NFS, others see the change from here on

    def close(self) -> None:
        """End; the file does not change any more when this returns."""
        self._ended.set()
        if self._thread:
            self._thread.join()

    def _watch(self) -> dict[Path, str]:
        """What the files of other machines say, which have not changed for `WATCH_S`."""
        others = self._others()
        until = time.monotonic() + WATCH_S
        while others and time.monotonic() < until:
            time.sleep(BEAT_S / 10)
            self._compare(others)
        return others

    def _compare(self, others: Mapping[Path, str]) -> None:
        for file, said in self._others().items():
            if said != others.get(file):
                self.close()
                if self._thread:  # this machine began at the same moment
                    self._file.unlink(missing_ok=True)
                raise local_locks(self._file.parent, said.partition(" ")[2].strip() or "another machine")

    def _others(self) -> dict[Path, str]:
        found = dict[Path, str]()
        for file in self._file.parent.glob(f"{_PREFIX}*"):
            if file != self._file:
                with contextlib.suppress(FileNotFoundError):
                    found[file] = file.read_text()  # opened each time: NFS then looks again
        return found


def local_locks(root: Path, host: str) -> StoreError:
    """The error that says that another machine writes to a directory, and locks do not keep it out."""
    return StoreError(
        f"Locks on {root} hold within each node only, and {host} uses it, too: nodes that share it would damage each "
        "other's files. Mount it with locks that hold on all nodes (NFS 4 without local_lock, Lustre with flock), or "
        "give the nodes directories that they do not share."
    )


def _beat(of: weakref.ref[Heartbeat], ended: threading.Event) -> None:
    while not ended.wait(BEAT_S) and (heartbeat := of()) is not None:
        with contextlib.suppress(OSError):  # writing runs fails as well, and says so
            heartbeat.beat()
        del heartbeat


def _this_machine() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return socket.gethostname()
