from __future__ import annotations

from pathlib import Path


def test_disks_that_fail_fail_runs_with_the_reason_and_nothing_else(with_mounts):
    folder = Path(__file__).parent
    with_mounts(folder / "disks.py", f"--confcutdir={folder}")  # without the fixtures that import Serve and the engine
