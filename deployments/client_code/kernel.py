"""Linux system calls that Python's `os` lacks."""

from __future__ import annotations

import ctypes
import os
import platform

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38

ARM = platform.machine() == "aarch64"
KNOWN = ARM or platform.machine() == "x86_64"  # whether the numbers of calls below are those of this machine
PIVOT_ROOT, CAPSET = (41, 91) if ARM else (155, 126)
MOUNT_SETATTR = 442

_CAPABILITIES_3 = 0x20080522  # the version of `capset`'s structures
_libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *args: int | bytes | ctypes.Array[ctypes.c_char] | None) -> int:
    """Call a function of the C library.

    Raises:
        OSError: It fails.
    """
    given = [ctypes.c_ulong(arg) if isinstance(arg, int) else arg for arg in args]
    result = int(getattr(_libc, name)(*given))
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}{args[:2]}: {os.strerror(error)}")
    return result


def drop_capabilities() -> None:
    """Keep none of root's rights; without new privileges no program gives one back.

    Raises:
        OSError: The kernel refuses it.
    """
    header = _CAPABILITIES_3.to_bytes(4, "little") + bytes(4)
    call("syscall", CAPSET, header, bytes(24))
