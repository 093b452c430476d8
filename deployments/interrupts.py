"""SIGTERM treated as Ctrl-C."""

from __future__ import annotations

import signal


def terminate_as_interrupt() -> None:
    """Make SIGTERM end this process and its children like Ctrl-C; joining Ray sets another handler."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
