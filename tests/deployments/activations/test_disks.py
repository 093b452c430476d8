from __future__ import annotations

from pathlib import Path


def test_disks_that_fail_fail_runs_with_the_reason_and_nothing_else(with_mounts):
    with_mounts(Path(__file__).with_name("disks.py"))
