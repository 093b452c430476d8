"""Several machines on one, for tests of clusters."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent
_CLONE_NEWNET = 0x40000000  # of Linux's setns


class Network:
    """Machines that see each other and nothing else: network and process namespaces of this one. They need root.

    Attributes:
        machines: Their names, with their addresses.
        folder: A home for each, by its name; `home`, where each finds its own; and `store`, which all of them see.
    """

    def __init__(self, folder: Path, machines: dict[str, str]) -> None:
        """Make a namespace and a home for each.

        Raises:
            OSError: There is no command `ip`.
            CalledProcessError: The system allows no namespaces.
        """
        self._prefix = f"vt{os.getpid()}"
        self.machines = machines
        self.folder = folder
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    def _make(self) -> None:
        self._ip("netns", "add", f"{self._prefix}net")
        self._ip("-n", f"{self._prefix}net", "link", "add", "bridge", "type", "bridge")
        self._ip("-n", f"{self._prefix}net", "link", "set", "bridge", "up")
        for name, address in self.machines.items():
            inside = ("-n", f"{self._prefix}{name}", "link")
            between = ("-n", f"{self._prefix}net", "link")
            self._ip("netns", "add", f"{self._prefix}{name}")
            self._ip(*inside, "add", "eth0", "type", "veth", "peer", name, "netns", f"{self._prefix}net")
            self._ip(*between, "set", name, "master", "bridge", "up")
            self._ip("-n", f"{self._prefix}{name}", "addr", "add", f"{address}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                self._ip(*inside, "set", device, "up")
            (self.folder / name / "ray").mkdir(parents=True)
        (self.folder / "store").mkdir()
        (self.folder / "home").mkdir()

    def close(self) -> None:
        """Take the namespaces away."""
        for name in ("net", *self.machines):
            subprocess.run(["ip", "netns", "del", f"{self._prefix}{name}"], check=False, capture_output=True)

    def env(self, machine: str) -> dict[str, str]:
        """The environment of a machine: its own home, and nothing of Ray's."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "VITRINE_"))}
        own = {"HOME": str(self.folder / machine), "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
        return kept | own | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0"}

    def command(self, machine: str, command: str) -> list[str]:
        """A shell command on a machine, with processes, shared memory and Ray's files of its own."""
        own = f"mount -t tmpfs tmpfs /dev/shm; mkdir -p /tmp/ray; mount --bind {self.folder / machine}/ray /tmp/ray"
        own += f"; mount --bind {self.folder / machine} {self.folder}/home"  # one path for the homes of all
        isolated = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-ec"]
        return ["ip", "netns", "exec", f"{self._prefix}{machine}", *isolated, f"{own}; {command}"]

    def asked(self, machine: str, *command: str | Path) -> subprocess.CompletedProcess[str]:
        """What a program says that uses a machine's network alone."""
        inside = ["ip", "netns", "exec", f"{self._prefix}{machine}", *command]
        return subprocess.run(inside, env=self.env(machine), capture_output=True, text=True, timeout=400)

    @contextlib.contextmanager
    def running(self, machine: str, command: str) -> Iterator[Path]:
        """Run a command while the block runs; gives its log."""
        log = self.folder / f"{machine}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(self.command(machine, command), env=self.env(machine), stdout=out, stderr=out)
        try:
            yield log
        finally:
            process.kill()  # and with it the namespace's first process, and so all of them
            process.wait()

    def threads(self, machine: str) -> ThreadPoolExecutor:
        """Threads of this process, and those that they start, whose sockets are a machine's."""

        def enter() -> None:
            libc = ctypes.CDLL(None, use_errno=True)
            with Path(f"/run/netns/{self._prefix}{machine}").open() as namespace:
                if libc.setns(namespace.fileno(), _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns")

        return ThreadPoolExecutor(initializer=enter, thread_name_prefix=machine)

    def processes(self, machine: str, name: str) -> list[int]:
        """The ids of a machine's processes whose command line starts with a name, the oldest first."""
        own, found = Path(f"/run/netns/{self._prefix}{machine}").stat().st_ino, list[tuple[int, int]]()
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended
                is_here = (process / "ns/net").stat().st_ino == own
                if is_here and (process / "cmdline").read_text().startswith(name):
                    began = (process / "stat").read_text().rpartition(")")[2].split()[19]
                    found.append((int(began), int(process.name)))
        return [number for _, number in sorted(found)]

    def plug(self, machine: str, state: str) -> None:
        """Take a machine off the network (`down`), or connect it again (`up`)."""
        self._ip("-n", f"{self._prefix}net", "link", "set", machine, state)

    @staticmethod
    def _ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True)
