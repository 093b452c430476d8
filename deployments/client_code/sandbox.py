"""Drops the rights of a job's process before it reads anything from its client."""

from __future__ import annotations

import glob
import json
import os
import signal
import stat
import struct
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec

from deployments.client_code import namespaces, seccomp
from deployments.client_code.kernel import (
    PR_SET_DUMPABLE,
    PR_SET_NO_NEW_PRIVS,
    PR_SET_PDEATHSIG,
    call,
    drop_capabilities,
)

PACKAGES = ("deployments", "nnsight", "torch", "transformers")  # which an editable installation has elsewhere
LIBRARIES = ("/usr", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/localtime")
SYSTEM = ("/proc/self", "/proc/cpuinfo", "/proc/meminfo", "/sys/devices/system/cpu")
DEVICES = ("/dev/null", "/dev/random", "/dev/urandom")


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


def landlock_version() -> int:
    """The kernel's version of Landlock; 0 if it has none."""
    try:
        return call("syscall", CREATE_RULESET, None, 0, VERSION)
    except OSError:
        return 0


def restrict_files(version: int, readable: Iterable[str], writable: Iterable[str], own: Iterable[str]) -> None:
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
                _allow_path(ruleset, path, rights & handled)
        call("syscall", RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _allow_path(ruleset: int, path: str, rights: int) -> None:
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


@dataclass(frozen=True)
class Sandbox:
    """The isolation layers of a job's process; each is independent.

    Attributes:
        on: Whether there is any layer. The process then has no new privileges and no capabilities.
        namespaces: Whether it has its own file system, network and, without a GPU, process ids.
        user_namespace: Whether they are made without root's rights.
        other_user: Whether it runs as a user who owns nothing.
        landlock: The kernel's version of Landlock; 0 for none.
        seccomp: Whether its system calls are filtered.
        gpu: Whether the weights are on a GPU, whose devices it keeps.
    """

    on: bool = False
    namespaces: bool = False
    user_namespace: bool = False
    other_user: bool = False
    landlock: int = 0
    seccomp: bool = False
    gpu: bool = False

    @property
    def isolates(self) -> bool:
        """Whether a job sees nothing of the server and cannot leave its own processes."""
        return self.namespaces and self.seccomp

    def __str__(self) -> str:
        if not self.on:
            return "off"
        layers = {
            "no_new_privs": True,
            "namespaces": self.namespaces,
            "another user": self.other_user,
            "Landlock": bool(self.landlock),
            "seccomp": self.seccomp,
        }
        without = ", ".join(name for name, holds in layers.items() if not holds) or "none"
        return f"{', '.join(name for name, holds in layers.items() if holds)}; missing: {without}"

    def enter(self) -> None:
        """Drop rights, files and the network. It may return in a child; call it on the process's only thread.

        Raises:
            OSError: The kernel refuses a layer.
        """
        if not self.on:
            return
        call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        readable, devices = list(_readable()), list(_devices(self.gpu))
        if self.namespaces:
            namespaces.enter(self.user_namespace, not self.gpu, readable + devices)
            os.environ |= {"HOME": namespaces.TMP, "TMPDIR": namespaces.TMP}
        if self.landlock:
            own = [namespaces.TMP] if self.namespaces else []
            restrict_files(self.landlock, readable, devices, own)
        if self.other_user:
            namespaces.become_other()
        drop_capabilities()
        # A change of user or namespace resets both.
        call("prctl", PR_SET_DUMPABLE, 1, 0, 0, 0)  # otherwise its files below /proc/self belong to root
        call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    def seal(self) -> None:
        """Filter the system calls of all threads from here on.

        Raises:
            OSError: The kernel refuses the filter.
        """
        if self.seccomp:
            seccomp.apply()


def best(gpu: bool) -> Sandbox:
    """The strongest sandbox of this system, tested in separate processes.

    Args:
        gpu: Whether the weights are on a GPU.

    Raises:
        RuntimeError: No sandbox works; the message has the reason.
    """
    least = Sandbox(on=True, landlock=landlock_version(), seccomp=seccomp.available(), gpu=gpu)
    candidates = [replace(least, namespaces=True, user_namespace=True), least]
    if os.geteuid() == 0 and not gpu:  # CUDA shares memory only with processes of the same user
        as_root = [replace(least, namespaces=True, other_user=True), candidates[0], replace(least, other_user=True)]
        candidates = [*as_root, least]
    failures = []
    for sandbox in candidates:
        failure = _failure(sandbox)
        if not failure:
            return sandbox
        failures.append(failure)
    raise RuntimeError("; ".join(failures))


def _failure(sandbox: Sandbox) -> str:
    """Why a process cannot work in a sandbox or reach its files; empty if it can."""
    paths = [*_readable(), *filter(os.path.exists, DEVICES)]
    mine, its = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            sandbox.enter()
            for path in paths:
                _reach(path)
            sandbox.seal()
            with open(os.__file__, "rb") as file:
                file.read(1)
            os.write(its, b"+")
        except BaseException as error:  # noqa: BLE001 - it is sent to the parent, and the process ends
            os.write(its, str(error).encode())
        finally:
            os._exit(0)
    os.close(its)
    with open(mine, "rb") as reading_end:
        answer = reading_end.read().decode(errors="replace")
    os.waitpid(child, 0)
    return "" if answer == "+" else answer or "a process in it was killed"


def _reach(path: str) -> None:
    """Open a file or list a directory, to check that the sandbox's user may read it.

    Raises:
        OSError: It fails.
    """
    fd = os.open(path, os.O_RDONLY)
    if stat.S_ISDIR(os.fstat(fd).st_mode):
        os.listdir(fd)
    os.close(fd)


def _readable() -> Iterator[str]:
    """The paths that a job may read, each mounted separately, so that their parents stay hidden."""
    paths = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    paths += [sys.prefix, sys.base_prefix]
    paths += [path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages")]
    for name in PACKAGES:
        if (package := find_spec(name)) and package.submodule_search_locations:
            paths += map(os.fspath, package.submodule_search_locations)
    paths += [path for path in sys.path if _holds_models(path)]
    paths += filter(os.path.isabs, os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep))
    paths += [os.path.realpath(path) for path in paths]  # as some libraries name themselves
    paths += [*LIBRARIES, *SYSTEM]
    shown: list[str] = []
    for path in sorted(set(paths) - {"/"}):
        if os.path.exists(path) and not any(path.startswith(f"{above}/") for above in shown):
            shown.append(path)
            yield path


def _holds_models(path: str) -> bool:
    """Whether a directory contains repositories' own code, as stored by transformers."""
    return bool(path) and os.path.isdir(os.path.join(path, "transformers_modules"))


def _devices(gpu: bool) -> Iterator[str]:
    yield from DEVICES
    if gpu:
        yield from [*glob.glob("/dev/nvidia*"), "/proc/driver/nvidia"]


if __name__ == "__main__":
    print(json.dumps(asdict(best(gpu=sys.argv[1] == "gpu"))))
