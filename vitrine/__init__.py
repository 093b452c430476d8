"""The client of a Vitrine server: activations to numpy, steering, stored runs. `docs/client.md` shows how.

What it offers is imported at its first use, so that importing the package takes milliseconds.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitrine.activations import Activations as Activations
    from vitrine.attending import Attention as Attention
    from vitrine.directions import Direction as Direction
    from vitrine.directions import Steer as Steer
    from vitrine.directions import difference_of_means as difference_of_means
    from vitrine.errors import ServerError as ServerError
    from vitrine.lenses import Lens as Lens
    from vitrine.loading import load as load
    from vitrine.loading import load_runs as load_runs
    from vitrine.loading import load_stack as load_stack
    from vitrine.nnsight_models import nnsight_model as nnsight_model
    from vitrine.patching import PatchGrid as PatchGrid
    from vitrine.rows import Run as Run
    from vitrine.server import AsyncServer as AsyncServer
    from vitrine.server import Server as Server
    from vitrine.server import connect as connect
    from vitrine.server import connect_async as connect_async
    from vitrine.serving import serve as serve
    from vitrine.sweeping import Sweep as Sweep

_MODULES = {
    "Activations": "activations",
    "AsyncServer": "server",
    "Attention": "attending",
    "Direction": "directions",
    "Lens": "lenses",
    "PatchGrid": "patching",
    "Run": "rows",
    "Server": "server",
    "ServerError": "errors",
    "Steer": "directions",
    "Sweep": "sweeping",
    "connect": "server",
    "connect_async": "server",
    "difference_of_means": "directions",
    "load": "loading",
    "load_runs": "loading",
    "load_stack": "loading",
    "nnsight_model": "nnsight_models",
    "serve": "serving",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("vitrine")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"vitrine.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES, "__version__"])
