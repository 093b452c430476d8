"""A head node that archives, as its own process, by `python -m` with ROOT ARCHIVE RUN: it stores a run and waits."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.deployments.activations.conftest import _make, open_head

head = open_head(Path(sys.argv[1]), sys.argv[2])
made = _make(sys.argv[3])
head.writer.submit(made.facts, made.batches).result()
head.writer.seal(made.facts.session_id).result()
print("sealed", flush=True)
sys.stdin.read()
