"""Imports early what httpx imports at its first request, because that import fails after nnsight's.

nnsight adds a method `save` to every object (`nnsight.CONFIG.APP.PYMOUNT`). anyio then finds it as an untyped attribute
in the classes that it defines. This module therefore removes the method while these classes are defined.
"""

from __future__ import annotations

import sys
from importlib import import_module


def _define() -> None:
    import_module("anyio.abc").SocketAttribute  # noqa: B018 - it is defined at its first use
    import_module("anyio.streams.tls").TLSAttribute  # noqa: B018


if hasattr(object, "save") and "nnsight" in sys.modules:
    _nnsight = import_module("nnsight")
    _nnsight._c.unmount("save")
    try:
        _define()
    finally:
        _nnsight._c.mount(_nnsight.save, "save")
else:
    _define()
