"""Every public name has an example in its docstring, and the examples are right."""

from __future__ import annotations

import inspect

import pytest

import vitrine
from tests.vitrine.examples import run

ELSEWHERE = {"serve", "nnsight_model"}  # they take a server of their own: test_serving.py runs their examples
METHODS = {
    f"Server.{name}": value
    for name, value in vars(vitrine.Server).items()
    if inspect.isfunction(value) and not name.startswith("_") and name != "close"
}
OF_RESULTS = {
    f"{kind.__name__}.{name}": getattr(value, "fget", None) or getattr(value, "__func__", value)
    for kind in (
        vitrine.Activations,
        vitrine.Attention,
        vitrine.Attribution,
        vitrine.Direction,
        vitrine.Lens,
        vitrine.PatchGrid,
        vitrine.Run,
        vitrine.Steer,
        vitrine.Sweep,
    )
    for name, value in vars(kind).items()
    if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, property | classmethod))
}
PUBLIC = {name: getattr(vitrine, name) for name in vitrine.__dir__() if name[0] != "_" and name in vitrine._MODULES}


@pytest.mark.parametrize("name", [name for name in PUBLIC | METHODS | OF_RESULTS if name not in ELSEWHERE])
def test_the_example_of_a_docstring_is_right(name, server, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(name, (PUBLIC | METHODS | OF_RESULTS)[name], {"vitrine": vitrine, "server": server})


@pytest.mark.parametrize("name", METHODS)
def test_a_blocking_method_has_the_signature_and_docstring_of_its_twin(name):
    own, twin = METHODS[name], getattr(vitrine.AsyncServer, name.removeprefix("Server."))
    assert inspect.signature(own) == inspect.signature(twin)
    assert own.__doc__ == twin.__doc__
