"""`python -m deployments.activations`: list, check, export and fetch stored activations."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deployments.activations.facts import StoreError
from deployments.activations.filters import Filter
from deployments.options import STORE_VARIABLE, default_store, home

if TYPE_CHECKING:
    from deployments.activations.files.places import Place

FORMATS = ("pt", "safetensors", "npz", "parquet", "hf")


class UserError(Exception):
    """What the user can put right."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; 0 where it did what was asked, 1 where it could not, 2 where it was not understood."""
    from deployments.activations.reader.pulling import PullError
    from deployments.permissions import restrict

    args = _parser().parse_args(argv)
    try:
        args.dir = _at(args.dir, is_new=args.run is _pull)
        if "to" in args or isinstance(args.dir, Path):
            restrict(args.to.expanduser() if "to" in args else args.dir)
        return int(args.run(args))
    except (UserError, PullError, StoreError, ValueError, OSError) as error:
        print(f"{args.prog}: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print(f"{args.prog}: stopped", file=sys.stderr)
    return 1


def _ls(args: argparse.Namespace) -> int:
    from deployments.activations.catalogue.catalogue import Catalogue

    catalogue = Catalogue.copied(args.dir)  # a server may run, whose database is its own
    if args.session is None:
        rows = [
            (one["id"], one["runs"], one["tokens"], size(one["bytes"]), time(one["updated"]), ", ".join(one["models"]))
            for one in catalogue.sessions(sys.maxsize)
        ]
        table(("session", "runs", "tokens", "size", "updated", "models"), rows, right="runs tokens size")
        return 0
    runs = catalogue.runs(Filter(args.session), None)
    if not runs:
        raise UserError(f"there is no session {args.session!r} in {args.dir}")
    said = {"run_id": "run", "prompt_tokens": "prompt", "tokens": "tokens", "finish_reason": "finish"}
    said |= {"model": "model", "sample_id": "sample"}
    lines = []
    for run in runs:
        tags = ", ".join(f"{name}={value}" for name, value in run["tags"].items()) or None
        lines.append((*(run[name] for name in said), time(run["created"]), tags, ", ".join(run["points"])))
    table((*said.values(), "created", "tags", "points"), lines, right="prompt tokens")
    return 0


def _export(args: argparse.Namespace) -> int:
    from deployments.activations.export.exports import export

    chosen = {"session": args.session, "run": _apart(args.run_ids), "points": _apart(args.points)}
    files = export(args.dir, args.to, args.format, overwrite=args.overwrite, **chosen)
    written = [path for file in files for path in (file.iterdir() if file.is_dir() else [file])]
    print(f"{len(written)} files, {size(sum(path.stat().st_size for path in written))}, in {args.to}")
    return 0


def _verify(args: argparse.Namespace) -> int:
    from deployments.activations.reader.sources import readable
    from deployments.activations.segments.verify import verify

    rows, bad = list[tuple[Any, ...]](), 0
    files, away = readable(args.dir, args.session)
    for path in files:
        found = verify(path)
        bad += not found.ok
        rest = "".join(f"; of {run}, {count} rows" for run, count in found.unfinished.items())
        name = str(path).removeprefix(f"{args.dir}/")
        rows.append((name, size(path.size), found.state, found.runs, found.rows, found.reason + rest))
    table(("file", "size", "state", "runs", "rows", ""), rows, right="size runs rows")
    if bad:
        print(f"\n{bad} of {len(rows)} files are not whole; their whole runs can be read", file=sys.stderr)
    if away:
        raise away
    return 1 if bad else 0


def _pull(args: argparse.Namespace) -> int:
    from deployments.activations.reader.pulling import pull

    key = args.api_key or os.environ.get("VITRINE_API_KEY") or None
    if not isinstance(args.dir, Path):
        raise UserError(f"--dir {args.dir} is in object storage: fetch the session into a directory")
    folder = pull(args.url, args.session, args.dir, runs=args.run_ids, points=args.points, api_key=key)
    print(f"{size(sum(file.stat().st_size for file in folder.iterdir()))} in {folder}")
    return 0


def _at(place: str, is_new: bool) -> Path | Place:
    """The store that `--dir` names; unless it may be new, it is there."""
    from deployments.activations.files.places import place_of

    if "://" in place:
        return place_of(place)
    root = Path(place).expanduser()
    if is_new:
        return root
    if not root.is_dir():
        raise UserError(f"there is no store at {root}: name one with --dir")
    return root.resolve()


def _apart(values: Sequence[str]) -> list[str] | None:
    return [part for value in values for part in value.split(",") if part] or None


def table(heads: Sequence[str], rows: Sequence[Sequence[Any]], right: str = "") -> None:
    """Print rows as columns of text, those that `right` names to the right; None is a dash."""
    cells = [tuple(heads), *(tuple("-" if cell is None else _printable(str(cell)) for cell in row) for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(heads))]
    rights = [head in right.split() for head in heads]
    for row in cells:
        aligned = [
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, rights, strict=True)
        ]
        print("  ".join(aligned).rstrip())


def _printable(text: str) -> str:
    """A user's text on one line, with nothing that a terminal would obey."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def size(count: int) -> str:
    """Bytes as people say them: `812 B`, `1.5 MiB`."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.0f} B" if units[0] == "B" else f"{value:.1f} {units[0]}"


def time(seconds: float) -> str:
    """Unix seconds as local time."""
    return datetime.fromtimestamp(seconds).astimezone().isoformat(sep=" ", timespec="seconds")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m deployments.activations", description=__doc__, allow_abbrev=False)
    parser.set_defaults(prog="deployments.activations")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Any, help: str, session: str | None = None) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=help, description=help, allow_abbrev=False)
        where = "the store's directory, or its archive's URI, s3://bucket/prefix?region=...; by default"
        folder = home() / "activations"
        added.add_argument("--dir", default=default_store(), help=f"{where} ${STORE_VARIABLE}, else {folder}")
        added.set_defaults(run=run)
        if session:
            added.add_argument("session", nargs=session)
        return added

    def chosen(added: argparse.ArgumentParser) -> None:
        added.add_argument("--run", dest="run_ids", action="append", default=[], help="only this run; may be repeated")
        added.add_argument("--points", action="append", default=[], help="only these, separated by commas or repeated")

    command("ls", _ls, "list the sessions, or the runs of one", "?")
    command("verify", _verify, "check all files, and list what is damaged and what can still be read", "?")
    added = command("export", _export, "write runs as files of another format")
    added.add_argument("to", type=Path, help="the directory for the files")
    added.add_argument("--format", choices=FORMATS, required=True)
    added.add_argument("--session", help="this session alone")
    added.add_argument("--overwrite", action="store_true", help="overwrite existing files")
    chosen(added)
    added = command("pull", _pull, "fetch a session from a server into the store's directory")
    added.add_argument("url", help="the server's address, http://host:8000")
    added.add_argument("session")
    added.add_argument("--api-key", help="by default the variable VITRINE_API_KEY")
    chosen(added)
    return parser


if __name__ == "__main__":
    sys.exit(main())
