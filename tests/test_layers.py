"""The layers: each part imports only parts below it, and no imports form a cycle."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# From high to low. A module belongs to its longest prefix here.
LAYERS = [
    "benchmarks",
    "vitrine",
    "evals.compare",
    "evals.gsm8k",
    "evals.outliers",
    "evals.probes",
    "evals.labels",
    "evals.report",
    "evals.results",
    "evals.task",
    "evals.server",
    "evals",
    "serve_app",
    "serve_app.routes",
    "serve_app.openapi_examples",
    "serve_app.openapi",
    "serve_app.answers",
    "serve_app.logprobs",
    "serve_app.readout_answers",
    "serve_app.backend",
    "serve_app.http",
    "serve_app.schemas",
    "deployments.collect",
    "deployments.replica",
    "deployments.interventions",
    "deployments.chat",
    "deployments.job",
    "deployments.messages",
    "deployments.client_code",
    "deployments.engine",
    "deployments.engine.capture",
    "deployments.model",
    "deployments.places",
    "deployments.model_files",
    "deployments.activations",
    "deployments.activations.actors",
    "deployments.activations.nodes",
    "deployments.activations.writer",
    "deployments.activations.archive",
    "deployments.activations.export",
    "deployments.activations.reader",
    "deployments.activations.catalogue",
    "deployments.activations.segments",
    "deployments.activations.uploads",
    "deployments.activations.state",
    "deployments.activations.files",
    "deployments.activations.facts",
    "deployments.activations.filters",
    "deployments.activations.limits",
    "deployments.readouts",
    "deployments.points",
    "deployments.demo_model",
    "deployments.clusters",
    "deployments.exposure",
    "deployments.options_table",
    "deployments.options",
    "deployments.errors",
    "deployments.installed",
    "deployments.interrupts",
    "deployments.tiles",
    "vitrine.points",
]
# The evaluator uses the server over HTTP and reads stored files. Of the server's code it may import only this.
EVALS_MAY = {
    "evals",
    *(layer for layer in LAYERS if layer.startswith("deployments.activations")),
    "deployments.clusters",
    "deployments.interrupts",
    "deployments.points",
    "deployments.readouts",
    "deployments.demo_model",
    "deployments.options",
}

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
def imports(name: str, only_at_import: bool = False) -> set[str]:
    """Modules of the project that a module imports, also under TYPE_CHECKING and, by default, in functions."""
    tree = ast.parse(MODULES[name].read_text())
    nodes = tree.body if only_at_import else list(ast.walk(tree))
    found = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative imports hide from this test"
            assert node.module
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return (found & set(MODULES)) - {name}


def layer_of(name: str) -> str:
    fits = [prefix for prefix in LAYERS if name == prefix or name.startswith(prefix + ".")]
    return max(fits, key=len) if fits else ""


@pytest.mark.parametrize("name", sorted(MODULES))
def test_imports_point_downward(name):
    if name == "deployments":
        return
    assert layer_of(name), f"{name} is in no layer: add it to LAYERS"
    for imported in imports(name):
        if layer_of(imported):
            assert LAYERS.index(layer_of(name)) <= LAYERS.index(layer_of(imported)), (
                f"{name} imports {imported}, above it"
            )


def test_no_imports_form_a_cycle():
    graph = {name: imports(name, only_at_import=True) for name in MODULES}
    TopologicalSorter(graph).prepare()  # raises CycleError with the cycle


def test_the_evaluator_uses_the_server_over_http_only():
    for name in MODULES:
        if name.split(".")[0] == "evals":
            others = {layer_of(imported) for imported in imports(name) if imported.split(".")[0] != "evals"}
            assert others - {""} <= EVALS_MAY, name


def test_client_and_server_use_each_other_over_http_only():
    for name in MODULES:
        others = {layer_of(imported) for imported in imports(name)} - {layer_of(name), "vitrine.points"}
        assert "vitrine" not in others or layer_of(name) == "benchmarks", name
        assert layer_of(name) != "vitrine" or not others, name


@pytest.mark.parametrize("absent", ["torch", "ray", "pandas", "matplotlib", "pyarrow.dataset"])
def test_the_client_is_light(absent):
    code = f"import sys, vitrine; vitrine.connect; sys.exit({absent!r} in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize("name", [name for name in sorted(MODULES) if layer_of(name).startswith(LIGHT)])
def test_the_engine_does_not_import_ray(name):
    tree = ast.parse(MODULES[name].read_text())
    tops = {node.module.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    tops |= {
        alias.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
    }
    assert "ray" not in tops


@pytest.mark.parametrize(
    ("imported", "absent"),
    [
        ("deployments.engine.engine", "ray"),
        ("deployments.activations.reader.loading", "ray"),
        ("deployments.activations.export.exports", "ray"),
        ("deployments.activations.export.exports", "datasets"),
        ("deployments.activations.reader.training", "ray"),
        ("deployments.activations.reader.tables", "ray"),
        ("deployments.activations.reader.pulling", "torch"),
        ("deployments.model_files.names", "torch"),
        ("deployments.model_files.smollm2", "torch"),
        ("serve_app", "torch"),
        ("serve_app.ingress", "torch"),
    ],
)
def test_a_module_does_not_import_a_heavy_package(imported, absent):
    code = f"import sys, {imported}; sys.exit({absent!r} in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_only_probes_need_scikit_learn():
    """It comes with the extra `probes`, and whoever serves or evaluates does not have it."""
    heavy = {"scipy", "sklearn"}
    needing = {
        path.relative_to(ROOT).as_posix()
        for top in ("deployments", "evals", "serve_app", "vitrine")
        for path in (ROOT / top).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [one.name for one in node.names])
        if name.split(".")[0] in heavy
    }
    assert all(path.startswith("evals/probes/") for path in needing), needing
