"""Linear probes on stored activations: `python -m evals.probes`, or `evals.probes.sweep(...)`.

`examples` chooses stored runs, `fits` trains probes on their rows, `headline` and `baselines` measure them, and
`pipeline` puts them together.
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
