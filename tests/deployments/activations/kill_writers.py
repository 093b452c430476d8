"""Kills writers with SIGKILL at random moments: `python -m tests.deployments.activations.kill_writers`.

Each kill ends a writer under load, at a system call or at any time. The next writer uses the same directory. After each
kill a copy of the directory is opened as by a store that starts. It counts runs that were answered as stored and are
not listed, and runs that are listed and cannot be read bit for bit. Ends with 1 if there are any.
"""

from __future__ import annotations

import argparse
import logging
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch

from deployments.activations import load
from deployments.activations.catalogue.catalogue import Catalogue
from deployments.activations.writer.recovery import recover
from tests.deployments.activations.killed_writer import made
from tests.deployments.activations.test_killed import KILLS, ClientLog, copied, forking, moments


def looked_through(root: Path, known: ClientLog) -> tuple[int, int, int]:
    """How many runs are listed, how many that were stored are not, and how many that are cannot be read."""
    recover(root)
    catalogue = Catalogue.rebuild(root)
    listed = {(run["session_id"], run["run_id"]): run["points"]["p"]["uri"] for run in catalogue.runs(limit=None)}
    catalogue.close()
    for session in known.deleting - {session for session, _ in listed}:
        known.forget(session)
    known.deleting.clear()
    unreadable = 0
    for (session, run_id), uri in listed.items():
        facts, values = made(session, run_id)
        try:
            run = load(uri, run_id, verify=True)
            unreadable += run.facts != facts or not torch.equal(run["p"], values)
        except (ValueError, OSError):
            unreadable += 1
    return len(listed), len(known.stored - listed.keys()), unreadable


def main() -> int:
    """Kill, count and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=60, help="end after so long, however many were killed")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # each start says what it mended
    chance, until = random.Random(options.seed), time.monotonic() + 60 * options.minutes
    killed = stored = lost = unreadable = turn = 0
    with tempfile.TemporaryDirectory(prefix="kills-") as folder, forking() as run:
        while killed < options.kills and time.monotonic() < until:
            root, known = Path(folder) / f"root-{turn}", ClientLog()
            root.mkdir()
            for moment in moments(chance, KILLS):
                turn += 1
                job = {"root": str(root), "prefix": str(turn), "seed": chance.random(), "steps": 30}
                said, code = run(job | {"segment_bytes": chance.choice([4_000, 20_000, 100_000])} | moment)
                killed += code == -signal.SIGKILL
                stored += sum(words[0] == "stored" for words in said)
                known.read(said)
                copy = copied(root, Path(folder) / "after")
                _, gone, bad = looked_through(copy, known)
                shutil.rmtree(copy)
                lost, unreadable = lost + gone, unreadable + bad
            shutil.rmtree(root, ignore_errors=True)  # an `rm` of the killed writer may still be at work
            print(f"{killed} killed, {stored} stored, {lost} lost, {unreadable} cannot be read", flush=True)
    return int(bool(lost or unreadable))


if __name__ == "__main__":
    sys.exit(main())
