"""How a directory of runs is opened by the one process that writes to it."""

from __future__ import annotations

import logging
import secrets
import time
from pathlib import Path

from deployments.activations.catalogue.database import can_hold, sealed_files
from deployments.activations.facts import StoreError
from deployments.activations.files.atomic import write
from deployments.activations.writer.recovery import make_root, recover

MARK = ".store-id"  # no session id begins with '.'
_ENDING_S = 15.0  # for which a server that is ending is waited for

logger = logging.getLogger(__name__)


def open_directory(root: Path) -> str:
    """Make a directory that is missing, and put right what a killed process left in it.

    Args:
        root: The directory, absolute and no link.

    Returns:
        What tells it from all others.

    Raises:
        StoreError: Another server has it.
        OSError: The disk refuses.
    """
    make_root(root)
    _check_alone(root)
    recover(root, sealed_files(root))
    return mark(root)


def mark(root: Path) -> str:
    """What tells a store's directory from any other, also from another node; made if it is missing.

    A disk that refuses it leaves one that no other node finds: then other nodes keep directories of their own.
    """
    try:
        if not (root / MARK).exists():
            write(root, ".", MARK, secrets.token_hex(16).encode())
        return (root / MARK).read_text()
    except OSError:
        logger.exception("%s cannot be marked: no other node finds it", root)
        return secrets.token_hex(16)


def _check_alone(root: Path) -> None:
    """Raise StoreError where another server's store keeps a directory; one that is ending is waited for."""
    until = time.monotonic() + _ENDING_S
    try:
        while not can_hold(root):
            if time.monotonic() > until:
                raise StoreError(
                    f"Another server keeps the activation store at {root}, and one server has a directory: stop it, or "
                    "give this one another activations_dir."
                )
            time.sleep(0.1)
    except OSError as error:  # the catalogue says what becomes of it
        logger.warning("it cannot be known whether another server keeps %s: %s", root, error)
