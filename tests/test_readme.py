"""The README's commands do what it says, word for word but for the server's address."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
ADDRESS = "http://127.0.0.1:8000"

# What other tests run, or what needs more than this machine: and why it is not run here.
ELSEWHERE = {
    "make demo": "test_make_demo_works_in_a_fresh_clone",
    "source .venv/bin/activate": "the fixtures put the environment on PATH",
    "serve run serve_app:app": "the fixture `served` is this command",
    "make smollm2": "test_smollm2.py runs it, where the package index is in reach",
    "serve run serve_app:build_app": "needs the hub; test_serve_run.py gives options to a model at hand",
    "pip install boto3": "for the cloud alone",
    "ray up": "needs a cloud; test_cluster_files.py checks the file",
    "ray exec": "needs a cloud and GPUs; test_cluster_files.py checks the file",
}


def commands() -> list[str]:
    """Every command of the shell blocks; one in quotes may span lines."""
    found = []
    for language, block in BLOCKS:
        if language == "sh":
            found += re.findall(r"^\S(?:[^'\n]|'[^']*')*$", block, re.MULTILINE)
    return found


def test_every_shell_command_of_the_readme_is_run_here_or_accounted_for():
    assert len(commands()) > 10
    for name in ELSEWHERE:
        assert any(command.startswith(name) for command in commands()), f"the README no longer says {name!r}"


@pytest.mark.parametrize(
    "command", [c for c in commands() if not c.startswith(tuple(ELSEWHERE))], ids=lambda c: c.split("\n")[0][:60]
)
def test_a_shell_command_of_the_readme_works(served, command):
    env = served.cluster.env | {"RAY_API_SERVER_ADDRESS": served.cluster.dashboard}
    if "ray job submit" in command:
        command += f" --base-url {ADDRESS}/v1"  # the server is not at the usual port
    if "evals.gsm8k" in command:
        command = command.replace("--samples 20", "--samples 2") + " --max-tokens 64"
    command = command.replace(ADDRESS, served.root)
    done = subprocess.run(["bash", "-euc", command], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"error"' not in done.stdout


@pytest.mark.parametrize(
    "code", [block for language, block in BLOCKS if language == "python"], ids=["openai", "client", "engine"]
)
def test_a_python_example_of_the_readme_works(served, code):
    done = subprocess.run(
        [sys.executable, "-c", code.replace(ADDRESS, served.root)],
        cwd=ROOT,
        env=served.cluster.env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_file_tree_of_the_readme_is_there():
    tree = next(block for language, block in BLOCKS if not language and "serve_app/" in block)
    directory = Path()
    for line in tree.splitlines():
        name = line.split()[0]
        if not line.startswith(" "):
            directory = ROOT / name
            assert directory.is_dir(), name
        elif not (directory / name).exists():
            pytest.fail(f"{directory.name}/{name} is not there")


def loads_what_it_printed(python: Path | str, printed: str, env: dict[str, str]) -> None:
    code = printed[printed.index("from deployments.activations import load") :].split("\n")[:3]
    loaded = subprocess.run([python, "-c", "\n".join(code)], env=env, capture_output=True, text=True, check=True)
    assert loaded.stdout.startswith("torch.Size([")


def test_the_demo_prints_what_came_of_it_and_how_to_load_it(tmp_path):
    env = plain_environment(tmp_path) | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "serve_app.demo"], env=env, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for mode in ("no-tools", "with-tools"):
        assert re.search(rf"^{mode} +\d+\.\d%", done.stdout, re.MULTILINE)
    assert "tokens/s" in done.stdout
    assert str(tmp_path / "home" / "results") in done.stdout
    loads_what_it_printed(sys.executable, done.stdout, env)


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
    loads_what_it_printed(tmp_path / "vitrine" / ".venv" / "bin" / "python", done.stdout, env)


PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "deployments").rglob("*.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_page_holds_a_place_that_was_to_be_filled(page):
    assert not re.search(r"^[A-Z_]{6,}$|\bTODO\b|\bTBD\b", page.read_text(), re.MULTILINE)
