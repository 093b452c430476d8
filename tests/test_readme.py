"""The commands of README and of the first guides work as they are, except for the server's address."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from ray.serve.scripts import build

from evals.gsm8k.__main__ import main
from tests import programs

ROOT = Path(__file__).parent.parent
ADDRESS = "http://127.0.0.1:8000"


def blocks(page: str) -> list[tuple[str, str]]:
    """Language and code of each block of README or of a page of docs/."""
    path = ROOT / "README.md" if page == "README" else ROOT / "docs" / f"{page}.md"
    return re.findall(r"^```(\w*)\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)


BLOCKS = blocks("README")

# What other tests run, or what needs more than this machine: and why it is not run here.
ELSEWHERE = {
    "make demo": "test_make_demo_works_in_a_fresh_clone",
    "source .venv/bin/activate": "the fixtures put the environment on PATH",
    "serve run serve_app:app": "the fixture `served` is this command with one thread, and `serve build` finds the app",
    "make smollm2": "test_smollm2.py runs it, where the package index is in reach",
    "serve run serve_app:build_app": "needs the hub; test_serve_run.py gives options to a model at hand",
}


def commands(blocks: list[tuple[str, str]]) -> list[str]:
    """Every command of the shell blocks; one in quotes may span lines."""
    found = []
    for language, block in blocks:
        if language == "sh":
            found += re.findall(r"^\S(?:[^'\n]|'[^']*')*$", block, re.MULTILINE)
    return found


COMMANDS = commands(BLOCKS)
# Those of the guides that README's first steps lead to, as they are; tests/evals/gsm8k runs others.
GUIDES = [
    *(command for command in commands(blocks("operate")) if "DELETE" in command),
    *(command for command in commands(blocks("evaluation")) if command.startswith("python -m evals.gsm8k --base-url")),
]


def test_readme_fits_two_screens_and_every_command_of_it_is_run_here_or_accounted_for():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
    for name in ELSEWHERE:
        assert any(command.startswith(name) for command in COMMANDS), f"the README no longer says {name!r}"


@pytest.mark.parametrize(
    "command",
    [*(c for c in COMMANDS if not c.startswith(tuple(ELSEWHERE))), *GUIDES],
    ids=lambda c: c.split("\n")[0][:60],
)
def test_a_shell_command_of_the_readme_or_a_guide_works(served, command):
    if "--samples 20" in command:
        command = command.replace("--samples 20", "--samples 2") + " --max-tokens 16"
    command = command.replace(ADDRESS, served.root)
    done = subprocess.run(
        ["bash", "-euc", command], cwd=ROOT, env=served.cluster.env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"error"' not in done.stdout


def test_serve_finds_the_app_of_the_shipped_model(monkeypatch):
    """By `serve build`, in this process: the fixture `served` starts the command itself."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", [*sys.path])  # to which it adds
    done = CliRunner().invoke(build, ["serve_app:app"])
    assert done.exit_code == 0, done.output
    assert "import_path: serve_app:app" in done.output
    assert {"- name: ModelReplica", "- name: Ingress"} <= set(map(str.strip, done.output.splitlines()))


@pytest.fixture(scope="module")
def interpreter(served) -> Iterator[programs.Interpreter]:
    """One process for the examples in Python, as each takes seconds to import what it needs."""
    with programs.interpreter(sys.executable, served.cluster.env, cwd=ROOT) as running:
        yield running


@pytest.mark.parametrize(
    "code", [block for language, block in BLOCKS if language == "python"], ids=["openai", "client"]
)
def test_a_python_example_of_the_readme_works(served, interpreter, tmp_path, code):
    (tmp_path / "example.py").write_text(code.replace(ADDRESS, served.root))
    said = interpreter.run(tmp_path / "example.py")
    assert "Traceback" not in said.stderr, said.stderr
    assert said.stdout.strip()


def to_load(printed: str) -> str:
    """The lines of an evaluation's output that load one of its runs."""
    return "\n".join(printed[printed.index("from vitrine import load") :].split("\n")[:3])


def test_the_demo_prints_what_came_of_it_and_how_to_load_it(served, tmp_path, capsys):
    """Its command, on 2 problems and the server that is there; `make demo` below starts one and takes all 20."""
    demo = re.search(r"-m evals.gsm8k --serve vitrine-demo (.*?)\n\n", (ROOT / "Makefile").read_text(), re.DOTALL)
    command = demo[1].replace("\\\n", "").split()
    results = str(tmp_path / "results")
    options = ["--samples=2", "--max-tokens=16", f"--base-url={served.base_url}", f"--results-dir={results}"]
    assert main([*command, *options]) == 0
    output = capsys.readouterr().out
    for mode in ("no-tools", "with-tools"):
        assert re.search(rf"^{mode} +\d+\.\d%", output, re.MULTILINE)
    assert "tokens/s" in output
    assert results in output
    exec(to_load(output), {})  # noqa: S102 - as a user's Python runs it
    assert capsys.readouterr().out.startswith("(")


def plain_environment(directory: Path) -> dict[str, str]:
    """This one without what the fixtures set, with a place of its own for what is kept."""
    inherited = ("PYTHONPATH", "VIRTUAL_ENV", "RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN")
    env = {name: value for name, value in os.environ.items() if name not in inherited}
    return env | {"VITRINE_HOME": str(directory / "home")}


@pytest.mark.long
def test_make_demo_works_in_a_fresh_clone(tmp_path):
    subprocess.run(["git", "clone", "-q", str(ROOT), str(tmp_path / "vitrine")], check=True)
    env = plain_environment(tmp_path)
    done = subprocess.run(["make", "demo"], cwd=tmp_path / "vitrine", env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    load = [tmp_path / "vitrine" / ".venv" / "bin" / "python", "-c", to_load(done.stdout)]
    loaded = subprocess.run(load, env=env, capture_output=True, text=True, check=True)
    assert loaded.stdout.startswith("(")


PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "deployments").rglob("*.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_page_holds_a_place_that_was_to_be_filled(page):
    assert not re.search(r"^[A-Z_]{6,}$|\bTODO\b|\bTBD\b", page.read_text(), re.MULTILINE)
