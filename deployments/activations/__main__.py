"""`python -m deployments.activations`: list, check, export and fetch stored activations."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, get_args

from deployments.activations.facts import NO_OWNER, Format, StoreError
from deployments.activations.filters import Filter
from deployments.options import STORE_VARIABLE, default_store, home


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; 0 where it did what was asked, 1 where it could not, 2 where it was not understood."""
    from deployments.activations.reader.pulling import PullError
    from deployments.permissions import restrict

    args = _parser().parse_args(argv)
    try:
        if "://" not in args.dir:
            args.dir = Path(args.dir).expanduser().resolve()
            if not args.dir.is_dir() and args.run is not _pull:
                raise ValueError(f"there is no store at {args.dir}: name one with --dir")
        elif args.run in (_ls, _pull):
            raise ValueError(f"--dir {args.dir.partition('?')[0]} is in object storage: ask a server for its sessions")
        if "to" in args or isinstance(args.dir, Path):
            restrict(args.to.expanduser() if "to" in args else args.dir)
        return int(args.run(args))
    except (PullError, StoreError, ValueError, OSError) as error:
        print(f"{args.prog}: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print(f"{args.prog}: stopped", file=sys.stderr)
    return 1


def _ls(args: argparse.Namespace) -> int:
    from deployments.activations.index.index import Index

    index, rows = Index.reading(args.dir) or Index.scanned(args.dir), list[Sequence[Any]]()
    if args.session is None:
        for summed in index.sessions(sys.maxsize):
            counts = (summed["id"], summed["owner"], summed["runs"], summed["tokens"], size(summed["bytes"]))
            rows.append((*counts, time(summed["updated"]), ", ".join(summed["models"])))
        table("session owner runs tokens size updated models", rows, right="runs tokens size")
        return 0
    for run in index.runs(Filter(args.session), None):
        tags = ", ".join(f"{name}={value}" for name, value in run["tags"].items()) or None
        fields = (run[name] for name in ("run_id", "prompt_tokens", "tokens", "finish_reason", "model", "sample_id"))
        rows.append((*fields, time(run["created"]), tags, ", ".join(run["points"])))
    if not rows:
        raise ValueError(f"there is no session {args.session!r} in {args.dir}")
    table("run prompt tokens finish model sample created tags points", rows, right="prompt tokens")
    return 0


def _export(args: argparse.Namespace) -> int:
    from deployments.activations.exports import export

    chosen = {"session": args.session, "run": _apart(args.run_ids), "points": _apart(args.points)}
    files = export(args.dir, args.to, args.format, overwrite=args.overwrite, **chosen)
    written = [path for file in files for path in (file.iterdir() if file.is_dir() else [file])]
    print(f"{len(written)} files, {size(sum(path.stat().st_size for path in written))}, in {args.to}")
    return 0


def _verify(args: argparse.Namespace) -> int:
    from deployments.activations.reader.sources import segments
    from deployments.activations.segments.verify import verify

    rows, bad = list[tuple[Any, ...]](), 0
    for path in segments(args.dir, args.session):
        result = verify(path)
        bad += not result.ok
        rest = "".join(f"; of {run}, {count} rows" for run, count in result.unfinished.items())
        name = str(path).removeprefix(f"{args.dir}/")
        rows.append((name, size(path.stat().st_size), result.state, result.runs, result.rows, result.reason + rest))
    table("file size state runs rows reason", rows, right="size runs rows")
    if bad:
        print(f"\n{bad} of {len(rows)} files are not whole; their whole runs can be read", file=sys.stderr)
    return 1 if bad else 0


def _pull(args: argparse.Namespace) -> int:
    from deployments.activations.reader.pulling import pull

    key = args.api_key or os.environ.get("VITRINE_API_KEY") or None
    folder = pull(args.url, args.session, args.dir / NO_OWNER, args.run_ids, key, args.owner)
    print(f"{size(sum(file.stat().st_size for file in folder.iterdir()))} in {folder}")
    return 0


def _apart(values: Sequence[str]) -> list[str] | None:
    return [part for value in values for part in value.split(",") if part] or None


def table(heads: str, rows: Sequence[Sequence[Any]], right: str = "") -> None:
    """Print rows as columns of text, those that `right` names to the right; None is a dash."""
    names = heads.split()
    cells = [names, *(["-" if cell is None else _printable(str(cell)) for cell in row] for row in rows)]
    columns = list[list[str]]()
    for name, column in zip(names, zip(*cells, strict=True), strict=True):
        align = str.rjust if name in right.split() else str.ljust
        columns.append([align(cell, max(map(len, column))) for cell in column])
    for row in zip(*columns, strict=True):
        print("  ".join(row).rstrip())


def _printable(text: str) -> str:
    """A user's text on one line, with nothing that a terminal would obey."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def size(count: float) -> str:
    """Bytes as people say them: `812 B`, `1.5 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def time(seconds: float) -> str:
    """Unix seconds as local time."""
    return datetime.fromtimestamp(seconds).astimezone().isoformat(sep=" ", timespec="seconds")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m deployments.activations", description=__doc__, allow_abbrev=False)
    parser.set_defaults(prog="deployments.activations")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Any, help: str, session: str | None = None) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=help, description=help, allow_abbrev=False)
        where = "the store's directory, or its bucket's URI, s3://bucket/prefix?region=...; by default"
        folder = home() / "activations"
        added.add_argument("--dir", default=default_store(), help=f"{where} ${STORE_VARIABLE}, else {folder}")
        added.set_defaults(run=run)
        if session:
            added.add_argument("session", nargs=session)
        return added

    command("ls", _ls, "list the sessions, or the runs of one", "?")
    command("verify", _verify, "check all files, and list what is damaged and what can still be read", "?")
    added = command("export", _export, "write runs as files of another format")
    added.add_argument("to", type=Path, help="the directory for the files")
    added.add_argument("--format", choices=get_args(Format), required=True)
    added.add_argument("--session", help="this session alone")
    added.add_argument("--overwrite", action="store_true", help="overwrite existing files")
    added.add_argument("--run", dest="run_ids", action="append", default=[], help="only this run; may be repeated")
    added.add_argument("--points", action="append", default=[], help="only these, separated by commas or repeated")
    added = command("pull", _pull, "fetch a session from a server into the store's directory")
    added.add_argument("url", help="the server's address, http://host:8000")
    added.add_argument("session")
    added.add_argument("--api-key", help="by default the variable VITRINE_API_KEY")
    added.add_argument("--owner", help="whose session, for admins; by default their own")
    added.add_argument("--run", dest="run_ids", action="append", default=[], help="only this run; may be repeated")
    return parser


if __name__ == "__main__":
    sys.exit(main())
