"""Checks that the disk has room for a run before it is computed."""

from __future__ import annotations

import asyncio
import errno
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from deployments.activations.facts import explained
from deployments.activations.files.disk import NEW

_EVERY_S = 1.0  # a disk is tried so often at most, however many ask


class DiskCheck:
    """Tries the disk of a store's directory, absolute and no link."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="room")  # one tries it at a time, however long it takes
        self._tried = -_EVERY_S
        self._failed: OSError | None = None

    async def check(self, size: int) -> None:
        """Raise StoreError if so many bytes cannot be written now; the message has the reason and what to do."""
        with explained(self._root):
            await asyncio.get_running_loop().run_in_executor(self._pool, self._check, size)

    def _check(self, size: int) -> None:
        if time.monotonic() - self._tried >= _EVERY_S:
            self._failed = None
            try:
                with tempfile.TemporaryFile(dir=self._root, prefix=NEW, buffering=0) as file:
                    file.write(b"\0")
                    os.fsync(file.fileno())
            except OSError as error:
                self._failed = error
            self._tried = time.monotonic()
        if self._failed:
            raise self._failed.with_traceback(None)
        disk = os.statvfs(self._root)
        if size > (free := disk.f_bavail * disk.f_frsize):
            raise OSError(errno.ENOSPC, f"{free} bytes are free, and up to {size} may be recorded")
