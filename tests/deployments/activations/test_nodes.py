"""Several writers, on several nodes, below one root."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_each_node_writes_files_of_its_own_and_the_store_knows_them_all(tmp_path):
    # In a process of its own, since this one may have joined the tests' shared cluster.
    env = os.environ | {"PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled"}
    script = Path(__file__).with_name("two_nodes.py")
    done = subprocess.run(
        [sys.executable, script, str(tmp_path)], env=env, capture_output=True, text=True, timeout=300, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len([line for line in done.stdout.splitlines() if line.startswith(("both", "a "))]) == 5
