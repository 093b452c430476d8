"""Run by test_nodes with a directory: a store on the head of a cluster of two machines, and runs from both.

A machine is a Ray node with processes and mounts of its own, of which nothing is left once it is killed. The second has
the directory `shared` as the first, another disk at `apart`, and at `locks` the same files with locks of its own.
"""

from __future__ import annotations

import faulthandler
import itertools
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from deployments.activations import read_run
from deployments.activations.actors.reader import connect_reader
from deployments.activations.actors.store import connect
from deployments.activations.facts import SessionName, StoreError
from deployments.activations.limits import Retention
from deployments.activations.nodes import connect_writer, node_writers
from deployments.errors import RequestError
from tests.deployments.activations.killed_writer import SESSIONS, batches, made
from tests.waiting import until
from vitrine.own_server import free_port

LIMIT_S = 480  # then the stacks are printed
RAY = ["--num-cpus=1", "--object-store-memory=100000000", "--disable-usage-stats", "--node-ip-address=127.0.0.1"]
ISOLATED = ["unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]


class Machine:
    def __init__(self, log: Path, mounts: str, *command: str) -> None:
        self._log, script = log, f"{mounts} exec ray start {' '.join([*command, *RAY])} --block"
        with log.open("wb") as out:
            self._process = subprocess.Popen([*ISOLATED, "sh", "-ec", script], stdout=out, stderr=out)

    def wait(self) -> None:
        until(lambda: "Ray runtime started" in self._log.read_text(), limit_s=180)

    def kill(self) -> None:
        """Kill the namespace's first process, which ends once all others have."""
        pid = self._process.pid
        if self._process.poll() is None:
            for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
                os.kill(int(child), signal.SIGKILL)
        self._process.wait()


@ray.remote(num_cpus=0, max_concurrency=2)
class Replica:
    """Sends runs as a replica does."""

    def __init__(self, root, store):
        self.writer, self.is_own = connect_writer(root, store), False
        self.is_own = self.writer._actor_id != store._actor_id

    def writes_itself(self):
        return self.is_own

    def store(self, session, run_id, part=0):
        """Store a run, or its rest after a part; also why it could not be."""
        sent = [ray.put(batch) for batch in batches(session, run_id, 2)[part:]]
        try:
            return ray.get(self.writer.write.remote(made(session, run_id)[0], sent, part), timeout=60)
        except StoreError as error:
            return str(error)

    def begin(self, session, run_id):
        sent = [ray.put(batches(session, run_id, 2)[0])]
        ray.get(self.writer.append.remote(SessionName(None, session), run_id, 0, sent), timeout=60)

    def store_until_the_end(self, prefix, path):
        """Say in a file, durably, what is begun and what is answered, in the lines of killed_writer."""
        said = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

        def say(what, session, run_id):
            os.write(said, f"{what} {session} {run_id}\n".encode())
            os.fsync(said)

        for turn in itertools.count():
            for session in SESSIONS:
                say("begin", session, f"{prefix}-{turn}")
                if turn % 2:
                    self.begin(session, f"{prefix}-{turn}")
                stored = self.store(session, f"{prefix}-{turn}", turn % 2)
                assert not isinstance(stored, str), stored
                say("stored", session, f"{prefix}-{turn}")


def wait_for(reader, session: str, expected: set[str]) -> None:
    """Return once the session's runs are these."""

    def found() -> set[str]:
        try:
            listed = ray.get(reader.session.remote(session))
        except (ray.exceptions.ActorUnavailableError, RequestError, StoreError):  # it starts
            return set()
        return {run["run_id"] for run in listed["runs"]} if listed else set()

    until(found, lambda runs: runs == expected)


def check_stored(stored, session: str, run_id: str) -> str:
    """A run reads back; the part of its file's URI that names the writer."""
    uri = stored.points["p"].uri
    assert torch.equal(read_run(uri, run_id, verify=True)["p"], made(session, run_id)[1])
    return uri.rpartition("-")[0]


def replicas(root: Path, store):
    nodes = sorted(ray.nodes(), key=lambda node: "node:__internal_head__" not in node["Resources"])
    on = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in nodes]
    return [Replica.options(scheduling_strategy=strategy).remote(str(root), store) for strategy in on]


def write_both(root: Path) -> None:
    store, reader = connect(str(root)), connect_reader(str(root))
    here, there = replicas(root, store)
    assert ray.get([one.writes_itself.remote() for one in (here, there)]) == [False, True]
    names = (("h", here), ("t", there), ("u", there))
    files = {name: check_stored(ray.get(one.store.remote("s", name)), "s", name) for name, one in names}
    assert files["h"] != files["t"] == files["u"]
    assert {run["run_id"] for run in ray.get(reader.session.remote("s"))["runs"]} == {"h", "t", "u"}

    ray.get([one.begin.remote("s", name) for name, one in (("long-h", here), ("long-t", there))])
    ray.get(there.begin.remote("s", "withdrawn"))
    assert ray.get(store.withdraw.remote(SessionName(None, "s"), ["withdrawn", "unknown"]))
    assert not ray.get(store.withdraw.remote(SessionName(None, "s"), ["t"]))
    ray.get(there.store.remote("other", "kept"))
    assert ray.get(store.delete.remote("s"))
    assert not (root / "_/s").exists()
    for name, one in (("long-h", here), ("long-t", there)):
        assert "was deleted while the run went on" in ray.get(one.store.remote("s", name, 1))
    check_stored(ray.get(there.store.remote("s", "again")), "s", "again")

    ray.get(store.retain.remote(Retention(max_store_bytes=10)))
    until(lambda: "store's quota" in str(ray.get(there.store.remote("s", "too-much"))))
    ray.get(store.retain.remote(Retention()))
    until(lambda: not isinstance(ray.get(there.store.remote("s", "fits")), str))
    ray.kill(store, no_restart=False)
    ray.get(there.store.remote("other", "told"))  # waits until it is back
    wait_for(reader, "other", {"kept", "told"})
    assert len(node_writers(str(root))) == 1

    ray.get(there.begin.remote("other", "unfinished"))
    ray.kill(there)
    until(lambda: not node_writers(str(root)))  # a node without a replica has no actor that would keep it
    _, there = replicas(root, store)
    assert ray.get(there.writes_itself.remote())
    check_stored(ray.get(there.store.remote("other", "after")), "other", "after")
    wait_for(reader, "other", {"kept", "told", "after"})


def write_through_the_head(root: Path) -> None:
    store = connect(str(root))
    here, there = replicas(root, store)
    assert ray.get([one.writes_itself.remote() for one in (here, there)]) == [False, False]
    assert check_stored(ray.get(there.store.remote("s", "r")), "s", "r").startswith(root.as_uri())


def main(folder: Path) -> None:
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    os.environ |= {"RAY_AUTH_MODE": "disabled", "VITRINE_HOME": str(folder / "home")}
    shared, apart, locks, lower, work = (folder / name for name in ("shared", "apart", "locks", "lower", "work"))
    for path in (shared, apart, locks, lower, work):
        path.mkdir()
    mounts = f"mount -t tmpfs tmpfs {apart}; mount -t overlay overlay "
    mounts += f"-o lowerdir={lower},upperdir={locks},workdir={work} {locks};"
    logs, address = [folder / "head.log", folder / "worker.log"], f"127.0.0.1:{(port := free_port())}"
    own = ["--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={folder / 'ray'}"]
    machines = [Machine(logs[0], "", *own)]
    try:
        machines[0].wait()
        machines.append(Machine(logs[1], mounts, f"--address={address}"))
        machines[1].wait()
        ray.init(address, namespace="vitrine", log_to_driver=False)
        until(lambda: len(ray.nodes()) == 2)
        write_both(shared)
        print("both nodes write into a directory that they share", flush=True)
        for root in (apart, locks):
            write_through_the_head(root)
            print("both nodes write through the head", flush=True)

        here, there = replicas(shared, connect(str(shared)))
        for one, name in ((here, "here"), (there, "there")):
            one.store_until_the_end.remote(name, folder / name)
        lines = lambda name: (folder / name).read_bytes().count(b"stored") if (folder / name).exists() else 0  # noqa: E731
        until(lambda: lines("there") > 20)
        machines[1].kill()
        before = lines("here")
        until(lambda: lines("here") > before + 20)  # the others go on
    except BaseException:  # noqa: BLE001 - printed for the test, which fails
        traceback.print_exc()
    finally:
        for machine in machines:
            machine.kill()
        print("both nodes were killed", flush=True)
        os._exit(0)  # Ray would wait for the head


if __name__ == "__main__":
    main(Path(sys.argv[1]))
