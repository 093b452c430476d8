"""Write the lock files anew: `make lock`, after a dependency or its version in constraints.txt has changed.

server.txt: what the extra serve needs besides torch; dev.txt: what tests and tools need. Every file of a version is
there by its hash, for Linux and macOS: `pip install --no-deps --require-hashes -r locks/server.txt -r locks/torch.txt`.
gguf.txt: the extra gguf, besides what the server needs.
torch.txt: the package index's torch and, for Linux, its CUDA libraries, which constraints.txt does not name. Of them
tests need Triton with a torch for CPUs, too, so that it is in dev.txt as well.
torch-cpu.txt: a build for CPUs alone, which needs none of them and is not on the index: written by hand. Between two
builds of one version pip takes the one whose hash the index says, hence files of their own.
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

Pins = dict[str, str]  # by `name==version`, all lines of a requirement


def main() -> None:
    """Write all of them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    build = "\n".join(project["build-system"]["requires"])
    server = compiled("pyproject.toml", "-", "--extra=serve", given=build)
    both = compiled("pyproject.toml", "-", "--extra=dev", given=build)
    gguf = compiled("pyproject.toml", "-", "--extra=serve", "--extra=gguf", given=build)
    constrained = re.findall(r"^\w\S*(?===)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    known = {canonicalize_name(name) for name in constrained}
    unknown = {pin for pin in both if pin.partition("==")[0] not in known}
    torch = {pin for pin in unknown if "'linux'" in both[pin]}  # the other unknown are for where Ray does not run
    torch |= {pin for pin in server if pin.startswith("torch==")}
    write("server.txt", {pin: lines for pin, lines in server.items() if pin not in unknown | torch})
    write("torch.txt", {pin: lines for pin, lines in server.items() if pin in torch})
    dev = both.keys() - server.keys() - unknown | {pin for pin in unknown if pin.startswith("triton==")}
    write("dev.txt", {pin: lines for pin, lines in both.items() if pin in dev})
    write("gguf.txt", {pin: lines for pin, lines in gguf.items() if pin not in server})
    write("clients.txt", compiled("tests/serve_clients/requirements.txt", "--no-deps", constrained=False))


def compiled(*arguments: str, given: str = "", constrained: bool = True) -> Pins:
    """What uv resolves for Linux and macOS at once: a package that only Windows needs is left out."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--universal", f"--python-version={PYTHON}"]
    command += ["--generate-hashes", "--no-annotate", "--no-header", *arguments]
    if constrained:
        command += ["--constraint", "constraints.txt"]
    text = subprocess.run(command, cwd=ROOT, input=given, stdout=subprocess.PIPE, text=True, check=True).stdout
    found = re.split(r"\n(?=\w)", text.strip())
    pins = {re.split(r"[\s;]", lines, maxsplit=1)[0]: lines for lines in found}
    return {pin: lines for pin, lines in pins.items() if "; sys_platform == 'win32'" not in lines}


def write(name: str, pins: Pins) -> None:
    """A lock file."""
    (HERE / name).write_text("# Written by `make lock`.\n" + "\n".join(pins.values()) + "\n")


if __name__ == "__main__":
    main()
