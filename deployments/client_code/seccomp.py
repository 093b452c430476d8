"""The system call filter of a job's process: no new processes, sockets, mounts or namespaces.

It is a program for the kernel's BPF machine, which gets a call's number and arguments and returns allow or refuse. A
refused call fails with EPERM.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from dataclasses import dataclass

from deployments.client_code.kernel import ARM, KNOWN, PR_SET_PDEATHSIG, call

# Refused calls, by their numbers on x86-64 and on 64-bit ARM (None where the call does not exist).
REFUSED: dict[str, tuple[int, int | None]] = {
    # processes and programs; `clone` for a new process is refused by its arguments
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "execveat": (322, 281),
    "setsid": (112, 157),  # it stays in the group that is killed with it
    "setpgid": (109, 154),
    # the network, and other ways to talk
    "socket": (41, 198),
    "socketpair": (53, 199),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "memfd_create": (319, 279),  # memory that its limit does not count
    "memfd_secret": (447, 447),
    "mremap": (25, 216),  # it makes the stack larger, which a limit on data does not count
    "map_shadow_stack": (453, 453),  # nor this
    # other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "tkill": (200, 130),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),
    "setpriority": (141, 140),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
    "ioprio_set": (251, 30),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    # what Landlock leaves open: attributes of files that the job's user owns, and emptying them before Linux 6.2
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "setxattrat": (463, 463),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "removexattrat": (466, 466),
    "file_setattr": (469, 469),
    "utime": (132, None),
    "utimes": (235, None),
    "utimensat": (280, 88),
    "futimesat": (261, None),
    "truncate": (76, 45),
    # namespaces and mounts
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_tree_attr": (467, 467),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    # parts of the kernel that no job needs and that have let programs break out
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "personality": (135, 92),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "modify_ldt": (154, None),
    "syslog": (103, 116),
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    "fanotify_init": (300, 262),
    "vmsplice": (278, 75),
    "io_setup": (206, 0),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "acct": (163, 89),
    "reboot": (169, 142),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
}
CLONE_THREAD = 0x10000
SHARED_ANONYMOUS, GROWS_DOWN = 0x21, 0x100  # memory that a limit on data does not count
F_SETOWN, F_SETSIG, F_SETOWN_EX = 8, 10, 15  # a signal to another process when a file is ready
FIOSETOWN, SIOCSPGRP = 0x8901, 0x8902  # the same, of a socket
# Attributes of a file that is open to be read: flags, project, version, and fs-verity, which makes it read-only.
FS_IOC = 0x40086602, 0x401C5820, 0x40087602, 0x40806685
FULL_MASK = 0xFFFFFFFF
# What is refused by an argument: numbers, the argument's place, masks and the values of its bits under them.
BY_ARGUMENT: dict[str, tuple[tuple[int, int], int, list[tuple[int, int]]]] = {
    "clone": ((56, 220), 0, [(CLONE_THREAD, 0)]),
    "mmap": ((9, 222), 3, [(SHARED_ANONYMOUS, SHARED_ANONYMOUS), (GROWS_DOWN, GROWS_DOWN)]),
    "prctl": ((157, 167), 0, [(FULL_MASK, PR_SET_PDEATHSIG)]),  # it ends with the host
    "fcntl": ((72, 25), 1, [(FULL_MASK, command) for command in (F_SETOWN, F_SETSIG, F_SETOWN_EX)]),
    "ioctl": ((16, 29), 1, [(FULL_MASK, command) for command in (FIOSETOWN, SIOCSPGRP, *FS_IOC)]),
}
CLONE3 = 435, 435  # its arguments cannot be seen
# Calls whose first argument is a process: it may be their own, or 0, which means their own or its group.
OWN_PROCESS_ONLY = {
    "kill": (62, 129),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
}
OWN_PROCESS_ONLY |= {"prlimit64": (302, 261), "sched_setaffinity": (203, 122)}

ARCHITECTURE = 0xC00000B7 if ARM else 0xC000003E  # as the kernel passes it to a filter
X32 = 0x40000000  # x86-64's calls with short pointers have numbers from here on

# BPF: load a word of the call's description, compare, combine by AND, and return the verdict on the call.
LOAD, EQUAL, AT_LEAST, AND, RETURN = 0x20, 0x15, 0x35, 0x54, 0x06
NUMBER, ARCH, ARGS = 0, 4, 16  # offsets in the description; arguments have 8 bytes, of which the low 4 come first
ALLOW, ERRNO, KILL = 0x7FFF0000, 0x00050000, 0x80000000
REFUSE = ERRNO | errno.EPERM

SET_MODE_FILTER, GET_ACTION_AVAIL = 1, 2
ALL_THREADS = 1
SECCOMP = 277 if ARM else 317


@dataclass(frozen=True)
class _Program:
    """The instructions so far: each has a code, two jumps (instructions to skip) and a value."""

    code: bytearray

    def add(self, code: int, value: int, if_true: int = 0, if_false: int = 0) -> None:
        """Append an instruction."""
        self.code.extend(struct.pack("<HBBI", code, if_true, if_false, value))

    def refuse(self, number: int, how: int = REFUSE) -> None:
        """Refuse a call by its number."""
        self.add(EQUAL, number, 0, 1)
        self.add(RETURN, how)

    def refuse_where(self, number: int, argument: int, cases: list[tuple[int, int]]) -> None:
        """Refuse a call where the bits of an argument under one of the masks have its value."""
        self.add(EQUAL, number, 0, 4 * len(cases) + 1)
        for mask, value in cases:
            self.add(LOAD, ARGS + 8 * argument)
            self.add(AND, mask)
            self.add(EQUAL, value, 0, 1)
            self.add(RETURN, REFUSE)
        self.add(RETURN, ALLOW)

    def refuse_others(self, number: int, pid: int) -> None:
        """Refuse a call where its first argument is neither this process nor 0."""
        self.add(EQUAL, number, 0, 5)
        self.add(LOAD, ARGS)
        self.add(EQUAL, pid, 2, 0)
        self.add(EQUAL, 0, 1, 0)
        self.add(RETURN, REFUSE)
        self.add(RETURN, ALLOW)


def available() -> bool:
    """Whether the kernel takes filters, and their numbers are known for this machine."""
    if not KNOWN:
        return False
    try:
        call("syscall", SECCOMP, GET_ACTION_AVAIL, 0, ERRNO.to_bytes(4, "little"))
    except OSError:
        return False
    return True


def apply() -> None:
    """Filter this process's calls from here on, in all of its threads.

    Raises:
        OSError: The kernel refuses the filter.
    """
    code = bytes(_program(os.getpid()))
    buffer = ctypes.create_string_buffer(code, len(code))
    description = struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer))
    if call("syscall", SECCOMP, SET_MODE_FILTER, ALL_THREADS, description):
        raise OSError(errno.EPERM, "a thread of this process has another seccomp filter")


def _program(pid: int) -> bytearray:
    program = _Program(bytearray())
    program.add(LOAD, ARCH)
    program.add(EQUAL, ARCHITECTURE, 1, 0)
    program.add(RETURN, KILL)
    program.add(LOAD, NUMBER)
    if not ARM:
        program.add(AT_LEAST, X32, 0, 1)
        program.add(RETURN, REFUSE)
    for numbers in REFUSED.values():
        number = numbers[ARM]
        if number is not None:
            program.refuse(number)
    program.refuse(CLONE3[ARM], ERRNO | errno.ENOSYS)  # the C library takes `clone` then
    for both, argument, cases in BY_ARGUMENT.values():
        program.refuse_where(both[ARM], argument, cases)
    for numbers in OWN_PROCESS_ONLY.values():
        program.refuse_others(numbers[ARM], pid)
    program.add(RETURN, ALLOW)
    return program.code
