"""Linear probes on stored activations: `python -m evals.probes`, or `evals.probes.sweep(...)`.

Files, labels and folds come first (`labels`, `examples`, `folds`), then rows (`features`), fits (`solver`, `fitting`),
figures (`metrics`, `baselines`), and what is written (`outputs`, `report`); `pipeline` puts them together. It needs the
extra `probes`: `pip install -c constraints.txt -e '.[probes]'`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evals.probes.options import Options
    from evals.probes.pipeline import Result, sweep

__all__ = ["Options", "Result", "sweep"]


def __getattr__(name: str) -> Any:
    """Import scikit-learn and torch at the first use, so that the command can name the extra where they are missing."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module("evals.probes.pipeline"), name)
