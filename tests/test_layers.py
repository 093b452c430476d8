"""The layers: each part imports only parts below it, and no imports form a cycle."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterable
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# What the server and the evaluator may import of the client, besides the version in `vitrine`.
CLIENT = ["vitrine.own_server", "vitrine.runs", "vitrine.connection", "vitrine.server_error", "vitrine.points"]
# From high to low. A module belongs to its longest prefix here. Modules of one layer may import each other.
LAYERS = [
    ("benchmarks",),
    ("evals",),
    ("serve_app",),
    ("deployments.collect", "deployments.model.validate"),
    ("deployments.replica",),
    ("deployments.interventions", "deployments.chat", "deployments.client_code", "deployments.job"),
    ("deployments.engine", "deployments.messages"),
    ("deployments.model", "deployments.places", "deployments.model_files", "deployments.readouts"),
    ("deployments.activations", "deployments.client_data", "deployments.readouts.files"),
    ("deployments.points", "deployments.readouts.spec"),
    ("deployments", "deployments.points.strict"),
    ("vitrine",),
]
# The evaluator uses the server over HTTP and reads stored files. Of the server's code it may import only this; what
# fits lenses also loads a model.
EVALS_MAY = [
    *(f"deployments.activations.{name}" for name in ("facts", "files", "reader", "segments")),
    *(f"deployments.{name}" for name in ("clusters", "command_line", "errors", "installed", "interrupts")),
    *(f"deployments.{name}" for name in ("permissions", "options", "points", "readouts", "demo_model")),
    *CLIENT,
]

LIGHT = ("deployments.engine", "deployments.model", "deployments.places", "deployments.points")  # must not import Ray


def modules() -> dict[str, Path]:
    found = {}
    for top in ("vitrine", "serve_app", "deployments", "evals", "benchmarks"):
        for path in (ROOT / top).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


@functools.cache
def parsed(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text())


@functools.cache
def named(name: str, only_at_import: bool = False) -> set[str]:
    """What a module imports, and what it imports of that; by default also under TYPE_CHECKING and in functions."""
    tree, found = parsed(name), set()
    for node in tree.body if only_at_import else ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative imports hide from this test"
            assert node.module
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def imports(name: str, only_at_import: bool = False) -> set[str]:
    """The modules of the project among them."""
    return (named(name, only_at_import) & MODULES.keys()) - {name}


def packages(name: str) -> set[str]:
    """The top packages of all that a module imports."""
    return {one.partition(".")[0] for one in named(name)}


def within(name: str, prefixes: Iterable[str]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def layer_of(name: str) -> int:
    """The number of a module's layer."""
    fits = [(len(prefix), number) for number, some in enumerate(LAYERS) for prefix in some if within(name, [prefix])]
    return max(fits)[1]


def test_imports_point_downward():
    upward = [
        f"{name} imports {imported}, above it"
        for name in sorted(MODULES.keys() - {"deployments"})
        for imported in imports(name)
        if layer_of(name) > layer_of(imported)
    ]
    assert upward == []


def test_no_imports_form_a_cycle():
    at_import = {name: imports(name, only_at_import=True) for name in MODULES}
    TopologicalSorter(at_import).prepare()  # raises CycleError with the cycle
    # Nor with those of functions and TYPE_CHECKING, where a module may name another of its package by the package.
    late = {name: imports(name) - {name.rpartition(".")[0]} for name in MODULES}
    TopologicalSorter(late).prepare()


def test_the_evaluator_uses_the_server_over_http_only():
    for name in filter(lambda name: within(name, ["evals"]), MODULES):
        loading = [f"deployments.{one}" for one in ("model", "model_files", "places")]
        allowed = ["evals", *EVALS_MAY, *(loading if within(name, ["evals.lenses"]) else [])]
        others = {imported for imported in imports(name) if not within(imported, allowed)}
        assert others <= {"deployments", "deployments.activations"}, name


def test_client_and_server_use_each_other_over_http_only():
    for name in MODULES:
        of_client = {imported for imported in imports(name) if within(imported, ["vitrine"])}
        if within(name, ["vitrine"]):
            assert imports(name) == of_client, name
        elif not within(name, ["benchmarks"]):
            assert all(within(imported, CLIENT) for imported in of_client - {"vitrine"}), name


def test_the_engine_does_not_import_ray():
    for name in MODULES:
        if within(name, LIGHT):
            assert "ray" not in packages(name), name


STORED = ["reader.loading", "reader.tables", "reader.training", "exports"]
LIGHT_SERVER = [
    "activations.reader.pulling",
    "activations.writer.writer",
    "activations.nodes",
    "model_files.names",
    "model_files.smollm2",
]


@pytest.mark.parametrize(
    "expected",  # in one process, in this order: a module, and the packages that no import so far may have loaded
    [
        [
            ("vitrine.server", ["torch", "ray", "pandas", "matplotlib", "pyarrow.dataset"]),  # has `vitrine.connect`
            *((name, ["torch"]) for name in (*(f"deployments.{one}" for one in LIGHT_SERVER), "serve_app.ingress")),
        ],
        [
            *((f"deployments.activations.{name}", ["ray", "datasets"]) for name in STORED),
        ],
    ],
    ids=["client and server", "stored rows"],
)
def test_modules_do_not_import_heavy_packages(expected):
    code = f"""import importlib, sys
for name, absent in {expected}:
    importlib.import_module(name)
    assert not (found := set(absent) & sys.modules.keys()), (name, found)
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_the_engine_needs_neither_ray_nor_the_packages_of_stored_rows_and_client_code():
    code = """import importlib.util, sys
from importlib.machinery import PathFinder

find = PathFinder.find_spec
absent = {"ray", "nnsight", "pyarrow"}
PathFinder.find_spec = classmethod(lambda _, name, *rest: None if name in absent else find(name, *rest))
assert importlib.util.find_spec("ray") is None
for name in sys.argv[1:]:
    importlib.import_module(name)
"""
    needed = ["engine.engine", "model.model", "model.load", "places.points"]
    names = [*(f"deployments.{name}" for name in needed), "benchmarks.gpu.__main__"]
    subprocess.run([sys.executable, "-c", code, *names], cwd=ROOT, check=True)


def test_only_probes_need_scikit_learn():
    """It comes with the extra `probes`, and whoever serves or evaluates does not have it."""
    needing = {name for name in MODULES if packages(name) & {"scipy", "sklearn"}}
    assert all(name.startswith("evals.probes") for name in needing), needing
