"""Kills writers with SIGKILL at random moments: `python -m tests.deployments.activations.kill_writers`.

Each kill ends a writer under load, at a system call or at any time. The next writer uses the same directory. After each
kill a copy of the directory is opened as by a store that starts. It counts runs that were answered as stored and are
not listed, and runs that are listed and cannot be read bit for bit. Ends with 1 if there are any.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import signal
import sys
import tempfile
import time
from itertools import count
from pathlib import Path

from tests.deployments.activations.test_killed import KILLS, forking, kills


def main() -> int:
    """Kill, count and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=60, help="end after so long, however many were killed")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # each start says what it mended
    chance, until = random.Random(options.seed), time.monotonic() + 60 * options.minutes
    killed = stored = lost = unreadable = 0
    with tempfile.TemporaryDirectory(prefix="kills-", ignore_cleanup_errors=True) as folder:
        os.environ["VITRINE_HOME"] = f"{folder}/home"
        with forking() as run:
            for turn in count():
                for said, code, known, copy in kills(run, Path(folder), chance, str(turn), KILLS):
                    killed += code == -signal.SIGKILL
                    stored += sum(words[0] == "stored" for words in said)
                    gone, bad = known.looked_through(copy)
                    lost, unreadable = lost + gone, unreadable + bad
                print(f"{killed} killed, {stored} stored, {lost} lost, {unreadable} cannot be read", flush=True)
                if killed >= options.kills or time.monotonic() >= until:
                    return int(bool(lost or unreadable))
    raise AssertionError("unreachable")


if __name__ == "__main__":
    sys.exit(main())
