"""The client of a Vitrine server: activations as numpy arrays, steering, stored runs. See `docs/client.md`.

Modules are imported at first use, so that importing the package takes milliseconds.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitrine.experiments.activations import Activations as Activations
    from vitrine.experiments.attending import Attention as Attention
    from vitrine.experiments.directions import Direction as Direction
    from vitrine.experiments.directions import Steer as Steer
    from vitrine.experiments.directions import difference_of_means as difference_of_means
    from vitrine.experiments.lenses import Lens as Lens
    from vitrine.experiments.patching import PatchGrid as PatchGrid
    from vitrine.experiments.sweeping import Sweep as Sweep
    from vitrine.loading import load as load
    from vitrine.loading import load_runs as load_runs
    from vitrine.loading import load_stack as load_stack
    from vitrine.nnsight_models import nnsight_model as nnsight_model
    from vitrine.own_server import serve as serve
    from vitrine.runs.rows import Run as Run
    from vitrine.server import AsyncServer as AsyncServer
    from vitrine.server import Server as Server
    from vitrine.server import connect as connect
    from vitrine.server import connect_async as connect_async
    from vitrine.server_error import ServerError as ServerError

_MODULES = {
    "Activations": "experiments.activations",
    "AsyncServer": "server",
    "Attention": "experiments.attending",
    "Direction": "experiments.directions",
    "Lens": "experiments.lenses",
    "PatchGrid": "experiments.patching",
    "Run": "runs.rows",
    "Server": "server",
    "ServerError": "server_error",
    "Steer": "experiments.directions",
    "Sweep": "experiments.sweeping",
    "connect": "server",
    "connect_async": "server",
    "difference_of_means": "experiments.directions",
    "load": "loading",
    "load_runs": "loading",
    "load_stack": "loading",
    "nnsight_model": "nnsight_models",
    "serve": "own_server",
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
