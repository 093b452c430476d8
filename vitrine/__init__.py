"""The client of a Vitrine server: activations as numpy arrays, steering, stored runs. See `docs/reference.md`.

Modules are imported at first use, so that importing the package takes milliseconds.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from vitrine.experiments.directions import Activations as Activations
    from vitrine.experiments.directions import Direction as Direction
    from vitrine.experiments.directions import Steer as Steer
    from vitrine.experiments.directions import difference_of_means as difference_of_means
    from vitrine.experiments.lenses import Attention as Attention
    from vitrine.experiments.lenses import Attribution as Attribution
    from vitrine.experiments.lenses import Lens as Lens
    from vitrine.experiments.patching import PatchGrid as PatchGrid
    from vitrine.experiments.sweeping import Sweep as Sweep
    from vitrine.loading import load as load
    from vitrine.loading import load_runs as load_runs
    from vitrine.loading import load_stack as load_stack
    from vitrine.own_server import serve as serve
    from vitrine.runs.rows import Run as Run
    from vitrine.server import AsyncServer as AsyncServer
    from vitrine.server import Server as Server
    from vitrine.server import connect as connect
    from vitrine.server import connect_async as connect_async
    from vitrine.server import nnsight_model as nnsight_model
    from vitrine.server_error import ServerError as ServerError

_NAMES = {
    "server": ["connect", "Server", "connect_async", "AsyncServer", "nnsight_model"],
    "own_server": ["serve"],
    "server_error": ["ServerError"],
    "experiments.directions": ["Activations", "difference_of_means", "Direction", "Steer"],
    "experiments.sweeping": ["Sweep"],
    "experiments.lenses": ["Lens", "Attention", "Attribution"],
    "experiments.patching": ["PatchGrid"],
    "loading": ["load", "load_runs", "load_stack"],
    "runs.rows": ["Run"],
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__])
    return getattr(import_module(f"vitrine.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
