"""Captured activations on disk: writing, listing and reading them.

`read_run("/data/activations/owner/session", run_id="...")["layers.8.output"]` is a torch tensor `[tokens, hidden]` that
maps its file; attention patterns are a sequence of tensors. `vitrine.load` needs nothing of this package. Nothing here
imports Ray: `deployments.activations.actors.store` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deployments.activations.reader.loading import Run, read_run, runs

__all__ = ["Run", "read_run", "runs"]


def __getattr__(name: str) -> Any:
    """Import the reader, and torch with it, at its first use: the HTTP face needs this package's plain parts."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from deployments.activations.reader import loading

    return getattr(loading, name)
