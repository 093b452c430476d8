"""Namespaces for a job: no network, no other processes, and a file system with only Python's libraries."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterable
from pathlib import Path

from deployments.client_code.kernel import MOUNT_SETATTR, PIVOT_ROOT, call

NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = (
    0x00020000,
    0x02000000,
    0x04000000,
    0x08000000,
    0x10000000,
    0x20000000,
    0x40000000,
)
NOBODY = 65534
OTHER = 65533  # a user that systems leave unused

MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 0x1000, 0x4000, 0x40000
MNT_DETACH = 2
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
READ_ONLY, NO_SETUID = 1, 2  # of mounts, as mount_setattr has them
TMP_BYTES = 64 << 20
TMP = "/tmp"


def enter(own_user: bool, own_pids: bool, paths: Iterable[str]) -> None:
    """Enter new namespaces with a file system of some read-only paths and an empty `/tmp`.

    With `own_pids` it returns in a child, whose parent waits for it and ends with it.

    Args:
        own_user: Whether to make a user namespace first, which needs no rights; otherwise root's are needed.
        own_pids: Whether to use own namespaces of process ids and System V objects. CUDA shares no memory with such a
            process.
        paths: Files and directories, which keep their paths; missing ones are skipped.

    Raises:
        OSError: The kernel refuses it.
    """
    user, group = os.getuid(), os.getgid()
    flags = NEWNS | NEWCGROUP | NEWUTS | NEWNET
    flags |= NEWUSER if own_user else 0
    flags |= NEWPID | NEWIPC if own_pids else 0
    call("unshare", flags)
    if own_user:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{NOBODY} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{NOBODY} {group} 1")
    if own_pids:
        _become_first()
    _show(paths)


def count_threads() -> bool:
    """Whether a limit on a user's threads counts those of a user namespace separately, as from Linux 5.14 on."""
    version = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return version is not None and (int(version[1]), int(version[2])) >= (5, 14)


def become_other() -> None:
    """Become a user who owns nothing; this needs root's rights.

    Raises:
        OSError: The kernel refuses it.
    """
    os.setgroups([])
    os.setresgid(OTHER, OTHER, OTHER)
    os.setresuid(OTHER, OTHER, OTHER)


def _become_first() -> None:
    """Continue in a child: a namespace of process ids applies to children. All its processes end with the first."""
    child = os.fork()
    if child:
        os.closerange(0, 1 << 16)  # the other side learns from its socket that the job has ended
        os.waitpid(child, 0)
        os._exit(0)


def _show(paths: Iterable[str]) -> None:
    """Make a file system of only these paths the root."""
    sources = [(path, os.path.realpath(path)) for path in paths if os.path.exists(path)]
    os.umask(0o022)  # the server's umask may hide the new directories from the job's user
    call("mount", None, b"/", None, MS_REC | MS_PRIVATE, None)
    call("mount", b"tmpfs", TMP.encode(), b"tmpfs", MS_NOSUID | MS_NODEV, b"mode=755,size=1m")
    os.chdir(TMP)
    os.mkdir("old")
    call("syscall", PIVOT_ROOT, b".", b"old")
    os.chdir("/")
    os.mkdir(TMP)
    options = f"mode=1777,size={TMP_BYTES},nr_inodes=4096".encode()
    call("mount", b"tmpfs", TMP.encode(), b"tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, options)
    for path, source in sources:
        _bind(f"/old{source}", path)
    call("umount2", b"/old", MNT_DETACH)
    os.rmdir("/old")
    _set_attributes("/", READ_ONLY | NO_SETUID, 0, AT_RECURSIVE)
    _set_attributes(TMP, 0, READ_ONLY, 0)


def _bind(source: str, path: str) -> None:
    if os.path.isdir(source):
        os.makedirs(path, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        Path(path).touch()
    call("mount", source.encode(), path.encode(), None, MS_BIND | MS_REC, None)


def _set_attributes(path: str, given: int, taken: int, flags: int) -> None:
    attributes = struct.pack("<QQQQ", given, taken, 0, 0)
    call("syscall", MOUNT_SETATTR, AT_FDCWD, path.encode(), flags, attributes, len(attributes))
