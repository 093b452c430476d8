"""README is short, and its `make demo` works; test_page_examples.py runs its other commands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from ray.serve.scripts import build

from evals.gsm8k.__main__ import main

ROOT = Path(__file__).parent.parent


def test_readme_fits_two_screens():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 110


def test_serve_finds_the_app_of_the_shipped_model(monkeypatch):
    """By `serve build`, in this process: the fixture `served` starts the command itself."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", [*sys.path])  # to which it adds
    done = CliRunner().invoke(build, ["serve_app:app"])
    assert done.exit_code == 0, done.output
    assert "import_path: serve_app:app" in done.output
    assert {"- name: ModelReplica", "- name: Ingress"} <= set(map(str.strip, done.output.splitlines()))


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
