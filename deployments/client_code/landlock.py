"""Landlock: restricts a process and its children to some files."""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterable

from deployments.client_code.kernel import call

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # on every architecture
VERSION = 1  # of CREATE_RULESET: say which version the kernel has
BENEATH = 1  # a rule for all below a path

# Rights, as bits.
WRITE_FILE, READ_FILE, READ_DIR, TRUNCATE, IOCTL = 1 << 1, 1 << 2, 1 << 3, 1 << 14, 1 << 15
REMOVE_DIR, REMOVE_FILE, MAKE_DIR, MAKE_FILE, MAKE_LINK = 1 << 4, 1 << 5, 1 << 7, 1 << 8, 1 << 12
OF_FILES = 1 | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL
READ = READ_FILE | READ_DIR
WRITE = WRITE_FILE | READ_FILE | TRUNCATE | IOCTL
OWN_FOLDER = WRITE | READ | REMOVE_DIR | REMOVE_FILE | MAKE_DIR | MAKE_FILE | MAKE_LINK


def version() -> int:
    """The kernel's version of Landlock; 0 if it has none."""
    try:
        return call("syscall", CREATE_RULESET, None, 0, VERSION)
    except OSError:
        return 0


def restrict(version: int, readable: Iterable[str], writable: Iterable[str], own: Iterable[str]) -> None:
    """Restrict this process to some files and, if the version can, block TCP and signals. It needs no_new_privs.

    Args:
        version: The kernel's version of Landlock, at least 1.
        readable: Paths that may be read; missing ones are skipped.
        writable: Files that may also be written, such as devices.
        own: Directories in which everything is allowed except executing files.

    Raises:
        OSError: The kernel refuses it.
    """
    handled = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    tcp = 0b11 if version >= 4 else 0  # bind and connect
    scoped = 0b11 if version >= 6 else 0  # abstract sockets and signals
    attributes = struct.pack("<QQQ", handled, tcp, scoped)[: 8 if version < 4 else 16 if version < 6 else 24]
    ruleset = call("syscall", CREATE_RULESET, attributes, len(attributes), 0)
    try:
        for paths, rights in ((readable, READ), (writable, WRITE), (own, OWN_FOLDER)):
            for path in paths:
                _allow(ruleset, path, rights & handled)
        call("syscall", RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        fd = os.open(path, os.O_PATH)
    except (FileNotFoundError, PermissionError):  # paths that this user cannot reach need no rule
        return
    try:
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            rights &= OF_FILES
        call("syscall", ADD_RULE, ruleset, BENEATH, struct.pack("<Qi", rights, fd), 0)
    finally:
        os.close(fd)
