"""The lock files pin versions by hash, and agree with constraints.txt and pyproject.toml."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
BASE, EXTRAS = PROJECT["project"]["dependencies"], PROJECT["project"]["optional-dependencies"]
PIN = re.compile(r"([\w.-]+)==(\S+?)(?: ;.*?)? *((?:\\\n +--hash=sha256:[0-9a-f]{64} ?)+)\n")


def locked(name: str) -> dict[str, str]:
    """By package its version; every line of the file belongs to a pin with hashes."""
    text = (ROOT / "locks" / f"{name}.txt").read_text()
    assert re.fullmatch(rf"# .*\n(?:{PIN.pattern})+", text), "a line is no pin with hashes"
    return {name: version for name, version, _ in PIN.findall(text)}


def pinned(path: Path) -> dict[str, str]:
    found = re.findall(r"^(\w\S*)==(\S+)", path.read_text(), re.MULTILINE)
    return {canonicalize_name(name): version for name, version in found}


def test_the_locks_have_the_versions_of_the_constraints():
    constraints = pinned(ROOT / "constraints.txt")
    server, dev, torch = map(locked, ("server", "dev", "torch"))
    libraries = torch.keys() - {"torch"}
    assert dev.pop("triton") == torch["triton"]
    assert server | dev | {"torch": torch["torch"]} == constraints
    assert not server.keys() & dev.keys()
    assert not libraries & constraints.keys()
    assert locked("gguf").items() <= dev.items()
    assert locked("torch-cpu") == {"torch": f"{constraints['torch']}+cpu"}
    assert locked("clients") == pinned(ROOT / "tests" / "serve_clients" / "requirements.txt")


@pytest.mark.parametrize(
    ("locks", "wanted"),
    [
        (["server", "torch"], BASE + EXTRAS["serve"] + PROJECT["build-system"]["requires"]),
        (["server", "torch", "dev"], BASE + EXTRAS["dev"]),
        (["server", "dev"], EXTRAS["docs"]),
        (["server", "gguf"], EXTRAS["gguf"]),
    ],
    ids=["server", "dev", "docs", "gguf"],
)
def test_every_dependency_is_locked_at_a_version_that_it_allows(locks, wanted):
    versions = {name: version for lock in locks for name, version in locked(lock).items()}
    for requirement in map(Requirement, wanted):
        if requirement.name == PROJECT["project"]["name"]:  # an extra that includes another
            continue
        assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)]), requirement


def test_the_locks_name_no_registry():
    for path in (ROOT / "locks").glob("*.txt"):
        assert not re.search(r"://|index-url|find-links", path.read_text()), path


def test_a_package_that_is_not_what_was_locked_is_not_installed(tmp_path):
    with zipfile.ZipFile(tmp_path / "changed-1.0-py3-none-any.whl", "w") as wheel:  # pip installs it where it may
        wheel.writestr("changed-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: changed\nVersion: 1.0\n")
        wheel.writestr("changed-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("changed-1.0.dist-info/RECORD", "")
    lock = tmp_path / "lock.txt"
    lock.write_text(f"changed==1.0 --hash=sha256:{'0' * 64}\n")
    makefile = (ROOT / "Makefile").read_text()
    options = re.findall(r"^(?:PIP|LOCKED) := .*", makefile, re.MULTILINE)
    given = " ".join(re.findall(r"--[\w-]+", " ".join(options))).split()
    command = [sys.executable, "-m", "pip", "install", *given, "--no-index", f"--find-links={tmp_path}"]
    done = subprocess.run([*command, f"--target={tmp_path / 'to'}", "-r", lock], capture_output=True, text=True)
    assert done.returncode
    assert "DO NOT MATCH THE HASHES" in done.stderr
