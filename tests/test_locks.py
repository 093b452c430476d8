"""The lock files pin versions by hash, and agree with constraints.txt and pyproject.toml."""

from __future__ import annotations

import re
import tomllib
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
