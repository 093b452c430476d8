"""A whole Ray cluster is killed at random moments while clients store runs: all answered runs are there."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.conftest import BIN
from tests.deployments.activations.test_killed import ClientLog
from vitrine.own_server import free_port

PROGRAM = Path(__file__).with_name("killed_client.py")
KILLS = 20
RAY = ["--num-cpus=1", "--include-dashboard=false", "--object-store-memory=100000000", "--disable-usage-stats"]


class Machine:
    """A Ray head and a client of the store, of which nothing is left once it is killed."""

    def __init__(self, folder: Path, root: Path, prefix: str, notes: Path) -> None:
        """Start both; the client waits for the head."""
        address = f"127.0.0.1:{free_port()}"
        self._env = os.environ | {
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(PROGRAM.parents[3]),
            "RAY_AUTH_MODE": "disabled",
        }
        port = address.rpartition(":")[2]
        head = ["ray", "start", "--head", f"--port={port}", "--node-ip-address=127.0.0.1", *RAY]
        self.log = folder / "log"
        self._processes = [self._start([*head, f"--temp-dir={folder}", "--block"])]
        self._processes.append(self._start([sys.executable, PROGRAM, address, root, prefix, notes]))

    def _start(self, command: list[str | Path]) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            return subprocess.Popen(command, env=self._env, stdout=log, stderr=log, start_new_session=True)

    def kill(self) -> int:
        """Kill all that was started, and all that this started; how many there were."""
        sessions, killed = {process.pid for process in self._processes}, set[int]()
        while alive := [process for process in psutil.process_iter() if self._session(process) in sessions]:
            for process in alive:
                killed.add(process.pid)
                with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
                    os.kill(process.pid, signal.SIGKILL)
        for process in self._processes:
            process.wait()
        return len(killed)

    @staticmethod
    def _session(process: psutil.Process) -> int | None:
        try:
            return None if process.status() == psutil.STATUS_ZOMBIE else os.getsid(process.pid)
        except (ProcessLookupError, psutil.NoSuchProcess):
            return None


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_what_was_answered_before_all_of_ray_is_killed_reads_back_whole(tmp_path: Path, eventually: Callable) -> None:
    root, known, chance, stored = tmp_path / "root", ClientLog(), random.Random(1), 0
    root.mkdir()
    for turn in range(KILLS):
        notes = tmp_path / f"notes-{turn}"
        with tempfile.TemporaryDirectory(prefix="vt-", ignore_cleanup_errors=True) as folder:
            machine = Machine(Path(folder), root, str(turn), notes)
            try:
                wait = functools.partial(
                    eventually, limit_s=120, describe=lambda _, log=machine.log: log.read_text()[-3000:]
                )
                wait(notes.exists)
                lines = chance.randrange(60)
                wait(lambda notes=notes, lines=lines: notes.read_bytes().count(b"\n") >= lines)
                time.sleep(chance.uniform(0, 0.05))  # at any moment between two
            finally:
                assert machine.kill() > 4  # the GCS, the raylet, the store, the client, ...
        said = [line.split() for line in notes.read_text().splitlines()]
        stored += sum(words[0] == "stored" for words in said)
        known.read(said)
        copy = shutil.copytree(root, tmp_path / f"after-{turn}")  # the next store finds all as it was left
        known.check(copy)
        shutil.rmtree(copy)
    print(f"{KILLS} killed, {stored} stored")
    assert stored
