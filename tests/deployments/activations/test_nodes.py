"""Stores on two machines: one that both write, others through the head, and what is left when they are killed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.conftest import BIN
from tests.deployments.activations.test_killed import ClientLog
from tests.deployments.activations.two_nodes import ISOLATED

ROOT = Path(__file__).parents[3]


@pytest.mark.long  # one more cluster
def test_each_node_writes_files_of_its_own_and_no_stored_run_is_lost_when_nodes_are_killed(monkeypatch):
    """In a process of its own, since this one may have joined the tests' shared cluster."""
    with tempfile.TemporaryDirectory(prefix="vt-", ignore_cleanup_errors=True) as name:  # short, for Ray's sockets
        folder = Path(name)
        try:
            subprocess.run([*ISOLATED, "mount", "-t", "tmpfs", "tmpfs", folder], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no namespaces of one's own here: {getattr(error, 'stderr', b'').decode() or error}")
        env = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
        env |= {"PYTHONPATH": str(ROOT), "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
        script = [sys.executable, Path(__file__).with_name("two_nodes.py"), folder]
        done = subprocess.run(script, env=env, capture_output=True, text=True, timeout=550, cwd=ROOT)
        assert done.stdout.count("both nodes") == 4, done.stdout + done.stderr
        known = ClientLog()
        for log in ("here", "there"):
            known.read([line.split() for line in (folder / log).read_text().splitlines()])
        monkeypatch.setenv("VITRINE_HOME", str(folder / "home"))
        assert len(known.stored) > 40
        known.begun |= {("s", run) for run in ("again", "fits", "too-much")} | {
            ("other", run) for run in ("kept", "told", "unfinished", "after")
        }
        known.check(folder / "shared")
