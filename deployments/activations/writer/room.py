"""Whether a store can take a run, found out before anything is computed for it."""

from __future__ import annotations

import errno
import os
import secrets
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from deployments.activations.failures import explain
from deployments.activations.files.locks import NEW, create, directory
from deployments.activations.files.mounts import Mount
from deployments.activations.limits import Held

_EVERY_S = 1.0  # a disk is tried so often at most, however many ask


class Room:
    """Tries one root. For one thread."""

    def __init__(self, root: Path, quotas: Callable[[str, int], Future[list[Held]]]) -> None:
        """Begin without having tried.

        Args:
            root: The store's directory, absolute and no link.
            quotas: `Writer.check_quotas`.
        """
        self._root = root
        self._quotas = quotas
        self._mount = Mount(root)
        self._tried = -_EVERY_S
        self._failed: OSError | None = None

    def check(self, session_id: str, size: int) -> None:
        """Find out whether a run can be stored now: every reason against it stands here.

        Args:
            session_id: The session that it would belong to.
            size: The most bytes that it may have.

        Raises:
            StoreError: It cannot; the message says why and what to do.
        """
        self._quotas(session_id, size).result()
        try:
            self._check_writes()
            self._check_space(size)
        except OSError as error:
            raise explain(self._root, error) from error

    def _check_writes(self) -> None:
        if time.monotonic() - self._tried >= _EVERY_S:
            self._failed = None
            try:
                self._mount.check()
                self._write()
            except OSError as error:
                self._failed = error
            self._tried = time.monotonic()
        if self._failed:
            raise self._failed.with_traceback(None)

    def _write(self) -> None:
        """Write a file, make it durable, and remove it."""
        name = f"{NEW}{secrets.token_hex(8)}"
        with directory(self._root) as top:
            file = create(name, top)
            try:
                os.write(file, name.encode())
                os.fsync(file)
            finally:
                os.unlink(name, dir_fd=top)
                os.close(file)

    def _check_space(self, size: int) -> None:
        disk = os.statvfs(self._root)
        free = disk.f_bavail * disk.f_frsize
        if size > free:
            raise OSError(errno.ENOSPC, f"{free} bytes are free, and up to {size} may be recorded")
