"""`python -m deployments.readouts add PATH`: install a readout's file, or an autoencoder in SAELens' format."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save

from deployments.errors import RequestError
from deployments.readouts.files import read_saelens
from deployments.readouts.sending import KEY, install


def main(argv: Sequence[str] | None = None) -> int:
    """Install one; returns 0, or 2 where it cannot be read or the server refuses it, with the reason on stderr."""
    parser = argparse.ArgumentParser(prog="python -m deployments.readouts", description=__doc__)
    add = parser.add_subparsers(dest="command", required=True).add_parser("add", help="install a readout")
    add.add_argument("path", type=Path, help="a safetensors file with a spec, or a directory as SAELens saves them")
    add.add_argument("--url", default="http://127.0.0.1:8000", help=f"the server (%(default)s); its key is ${KEY}")
    add.add_argument("--name", help="its name in requests; by default the name in the file, or of the directory")
    add.add_argument("--model", help="the served model's id")
    add.add_argument("--point", help="whose rows it reads")
    given = parser.parse_args(argv)
    fields = {name: getattr(given, name) for name in ("name", "model", "point") if getattr(given, name)}
    try:
        kept = _add(given.path, given.url, fields)
    except (RequestError, OSError) as error:
        print(f"deployments.readouts: {error}", file=sys.stderr)
        return 2
    print(f"{kept['name']}: {kept['kind']} at {kept['point']} of {kept['model']}, {kept['values']} values")
    return 0


def _add(path: Path, url: str, fields: dict[str, Any]) -> dict[str, Any]:
    if not path.is_dir():
        return install(url, path.read_bytes(), fields)
    spec, tensors = read_saelens(path)
    return install(url, save(tensors), {"name": path.resolve().name, **spec, **fields})


if __name__ == "__main__":
    sys.exit(main())
