"""Write the lock files anew: `make lock`, after a dependency or its version in constraints.txt has changed.

server.txt: what the server needs; dev.txt: what tests and tools need besides. Every file of a version is there by its
hash, for Linux and macOS: `pip install --no-deps --require-hashes -r locks/server.txt`.
cuda.txt: the libraries of the torch build that the package index has for Linux. pip has no way to leave out a line of
a file where another build of torch is taken, hence a file of its own; constraints.txt names none of them.
clients.txt: tests/serve_clients/requirements.txt.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
HERE = ROOT / "locks"
PYTHON = "3.11.5"  # and newer; the clients have dependencies without older ones
# The hashes of torch's builds for CPUs, which are not on the index.
CPU_BUILDS = {"torch==2.13.0": ["sha256:6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b"]}

Pins = dict[str, str]  # by `name==version`, all lines of a requirement


def main() -> None:
    """Write all of them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    build = "\n".join(project["build-system"]["requires"])
    server = compiled("pyproject.toml", "-", given=build)
    both = compiled("pyproject.toml", "-", "--extra=dev", given=build)
    constrained = re.findall(r"^\w\S*(?===)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    known = {canonicalize_name(name) for name in constrained}
    unknown = {pin for pin in both if pin.partition("==")[0] not in known}
    cuda = {pin for pin in unknown if "'linux'" in both[pin]}  # the rest is for where Ray does not run
    for pin, hashes in CPU_BUILDS.items():
        server[pin] += "".join(f" \\\n    --hash={one}" for one in hashes)
    write("server.txt", {pin: lines for pin, lines in server.items() if pin not in unknown})
    write("cuda.txt", {pin: lines for pin, lines in server.items() if pin in cuda})
    write("dev.txt", {pin: lines for pin, lines in both.items() if pin not in server and pin not in unknown})
    write("clients.txt", compiled("tests/serve_clients/requirements.txt", "--no-deps", constrained=False))


def compiled(*arguments: str, given: str = "", constrained: bool = True) -> Pins:
    """What uv resolves, for all platforms at once."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--universal", f"--python-version={PYTHON}"]
    command += ["--generate-hashes", "--no-annotate", "--no-header", *arguments]
    if constrained:
        command += ["--constraint", "constraints.txt"]
    text = subprocess.run(command, cwd=ROOT, input=given, stdout=subprocess.PIPE, text=True, check=True).stdout
    found = re.split(r"\n(?=\w)", text.strip())
    return {re.split(r"[\s;]", lines, maxsplit=1)[0]: lines for lines in found}


def write(name: str, pins: Pins) -> None:
    """A lock file."""
    (HERE / name).write_text("# Written by `make lock`.\n" + "\n".join(pins.values()) + "\n")


if __name__ == "__main__":
    main()
