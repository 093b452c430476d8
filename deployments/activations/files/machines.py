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
from pathlib import Path

from deployments.activations.facts import StoreError

BEAT_S = 2.0
WATCH_S = 10.0  # after which a file that has not changed is a leftover
_FRESH_S = 60.0  # since its last change, after which it is one without a look
_PREFIX = ".machine-"  # no session id begins with '.'
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # one for all containers of a machine, whose kernel keeps the locks

logger = logging.getLogger(__name__)


class Heartbeat:
    """Shows that this machine writes to a directory, until it is closed or garbage.

    Waits up to `WATCH_S` where another machine wrote there within the last minute. StoreError if one writes there now.
    """

    def __init__(self, root: Path, machine: str | None = None) -> None:
        self._file = root / f"{_PREFIX}{machine or _this_machine()}"
        self._counter = itertools.count()
        self._ended = threading.Event()
        try:
            self.beat()
            threading.Thread(target=_beat, args=(weakref.ref(self), self._ended), name="heartbeat", daemon=True).start()
            weakref.finalize(self, self._ended.set)
            self._check_alone()
        except OSError:  # as on a full disk: the runs that are there can be read, and new ones are refused
            logger.exception("%s cannot be written: if another machine writes to it, nobody notices", root)
        except BaseException:
            self.close()
            raise

    def beat(self) -> None:
        """Change the file."""
        file = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            os.pwrite(file, f"{next(self._counter):012} {socket.gethostname()}\n".encode(), 0)
        finally:
            os.close(file)  # over NFS, others see the change from here on

    def close(self) -> None:
        """End."""
        self._ended.set()

    def _check_alone(self) -> None:
        now = _seen(self._file)[1]
        others = {file: _seen(file) for file in self._file.parent.glob(f"{_PREFIX}*") if file != self._file}
        until = time.monotonic() + WATCH_S
        while time.monotonic() < until and any(now - changed < _FRESH_S for _, changed in others.values()):
            for file, (before, _) in others.items():
                if (after := _seen(file)[0]) not in ("", before):
                    raise local_locks(self._file.parent, after.partition(" ")[2].strip())
            time.sleep(BEAT_S / 10)
        for file in others:
            file.unlink(missing_ok=True)


def local_locks(root: Path, host: str) -> StoreError:
    """The error that says that another machine writes to a directory, and locks do not keep it out."""
    return StoreError(
        f"Locks on {root} hold within each node only, and {host} uses it, too: nodes that share it would damage each "
        "other's files. Mount it with locks that hold on all nodes (NFS 4 without local_lock, Lustre with flock), or "
        "give the nodes directories that they do not share."
    )


def _seen(file: Path) -> tuple[str, float]:
    """What a file says, and when it changed, in seconds of the file system's clock; nothing if it is gone."""
    with contextlib.suppress(FileNotFoundError), file.open() as opened:  # opened each time: NFS then looks again
        return opened.read(), os.fstat(opened.fileno()).st_mtime
    return "", 0.0


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
