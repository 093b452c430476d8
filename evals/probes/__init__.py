"""Linear probes on stored activations: `python -m evals.probes`, or `evals.probes.sweep(...)`.

`inputs/` chooses stored runs and reads their rows, `fitting/` trains probes and their controls, `outputs/` writes the
results, and `pipeline.py` puts them together.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evals.probes.pipeline import Result, sweep
    from evals.probes.sweep_options import Options

__all__ = ["Options", "Result", "sweep"]


def __getattr__(name: str) -> Any:
    """Import scikit-learn and torch at the first use.

    Raises:
        ImportError: scikit-learn is not installed; the message says how it is.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import_module("sklearn")
    except ImportError as error:
        raise ImportError(
            "scikit-learn is not installed: pip install -c constraints.txt -e '.[probes]'", name=error.name
        ) from error
    return getattr(import_module("evals.probes.pipeline"), name)
