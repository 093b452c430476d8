"""`python -m deployments.readouts add PATH`: install a readout's file, or an autoencoder in SAELens' format."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save

from deployments.command_line import form, parser
from deployments.errors import RequestError
from deployments.readouts.files import read_saelens
from deployments.readouts.sending import KEY, install


def main(argv: Sequence[str] | None = None) -> int:
    """Install one; returns 0, or 2 where it cannot be read or the server refuses it, with the reason on stderr."""
    given = command().parse_args(argv)
    fields = {name: getattr(given, name) for name in ("name", "model", "point") if getattr(given, name)}
    try:
        kept = _add(given.path, given.url, fields)
    except (RequestError, OSError) as error:
        print(f"deployments.readouts: {error}", file=sys.stderr)
        return 2
    print(f"{kept['name']}: {kept['kind']} at {kept['point']} of {kept['model']}, {kept['values']} values")
    return 0


def command() -> argparse.ArgumentParser:
    """The command's options."""
    text, example = "Install a probe, a direction or an autoencoder on a server.", "add probes/truth.safetensors"
    made = parser("deployments.readouts", text, example)
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add = commands.add_parser("add", help="install a file", **form(text, f"{made.prog} {example}")).add_argument
    add("path", metavar="PATH", type=Path, help="safetensors file with a spec, or a directory in the format of SAELens")
    add("--url", default="http://127.0.0.1:8000", help=f"address of the server; ${KEY} is its key")
    add("--name", help="name in requests (default: the name in the file, or of the directory)")
    add("--model", metavar="NAME", help="id of the served model (default: the model in the file)")
    add("--point", help="hook point that it reads (default: the point in the file)")
    return made


def _add(path: Path, url: str, fields: dict[str, Any]) -> dict[str, Any]:
    if not path.is_dir():
        return install(url, path.read_bytes(), fields)
    spec, tensors = read_saelens(path)
    return install(url, save(tensors), {"name": path.resolve().name, **spec, **fields})


if __name__ == "__main__":
    sys.exit(main())
