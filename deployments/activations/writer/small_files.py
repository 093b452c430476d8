"""Pins and limits, each a small file: the index repeats pins, and can be made again from these."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from deployments.activations.facts import SessionName, StoreError, explained
from deployments.activations.files.disk import PIN, directory, write
from deployments.activations.limits import Retention

LIMITS = ".limits.json"  # no session id starts with '.'

logger = logging.getLogger(__name__)


def set_pin(root: Path, session: SessionName, pinned: bool) -> None:
    """Pin a session that has a run, or take its pin away; durable when it returns. StoreError if the disk refuses."""
    with explained(root):
        if pinned:
            (root / session.folder).parent.mkdir(exist_ok=True)  # the bucket alone may have its files
            write(root, session.folder, PIN, b"")
            return
        with contextlib.suppress(FileNotFoundError), directory(root / session.folder) as folder:
            os.unlink(PIN, dir_fd=folder)
            os.fsync(folder)


def read_limits(root: Path) -> tuple[Retention, dict[str, Retention]]:
    """What `write_limits` wrote last; no limits where it never did, or they cannot be read."""
    try:
        limits, applications = json.loads((root / LIMITS).read_text())
        return Retention(**limits), {name: Retention(**own) for name, own in applications.items()}
    except FileNotFoundError:
        pass
    except (OSError, ValueError, TypeError):
        logger.exception("%s cannot be read: nothing is limited until an application starts", root / LIMITS)
    return Retention(), {}


def write_limits(root: Path, limits: Retention, applications: Mapping[str, Retention]) -> None:
    """Keep limits, and those that each application set, for a store that starts again. A full disk is logged."""
    said = json.dumps([asdict(limits), {name: asdict(own) for name, own in applications.items()}])
    try:
        with explained(root):
            write(root, ".", LIMITS, said.encode())
    except StoreError:
        logger.exception("the limits of %s are not kept: they hold until the store starts again", root)
