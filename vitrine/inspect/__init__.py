"""inspect_ai's model provider `vitrine/MODEL`, registered by an entry point; `model.py` is loaded on first use.

Labels of its logs are in `evals.labels`.
"""

from __future__ import annotations

from inspect_ai.model import ModelAPI, modelapi


@modelapi(name="vitrine")
def vitrine() -> type[ModelAPI]:
    """The provider's class.

    Raises:
        RuntimeError: inspect_ai's version differs from the one whose private modules the provider uses.
    """
    from inspect_ai import __version__

    if __version__ != VERSION:
        raise RuntimeError(
            f"inspect_ai {__version__} is installed; the provider needs {VERSION}: in Vitrine's clone, "
            "pip install -c constraints.txt -e '.[inspect]'"
        )
    from vitrine.inspect.model import VitrineAPI

    return VitrineAPI


VERSION = "0.3.285"
