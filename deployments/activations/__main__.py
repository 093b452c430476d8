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
from deployments.command_line import form, parser
from deployments.options import STORE_VARIABLE, default_store


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; 0 where it did what was asked, 1 where it could not, 2 where it was not understood."""
    from deployments.activations.reader.pulling import PullError
    from deployments.permissions import restrict

    args = command().parse_args(argv)
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


def command() -> argparse.ArgumentParser:
    """The commands' options."""
    made = parser("deployments.activations", "List, fetch, export and verify stored activations.", "ls")
    made.set_defaults(prog="deployments.activations")
    commands = made.add_subparsers(required=True, metavar="COMMAND")

    def subcommand(name: str, run: Any, text: str, example: str, session: str | None = None) -> Any:
        described = form(f"{text[0].upper()}{text[1:]}.", f"{made.prog} {name}{example}")
        added = commands.add_parser(name, help=text, **described)
        where = "directory or bucket URI (s3://bucket/prefix?region=...) of the store"
        text = f"{where} (default: ${STORE_VARIABLE}, else $VITRINE_HOME/activations)"
        added.add_argument("--dir", default=default_store(), help=text)
        added.set_defaults(run=run)
        if session:
            added.add_argument("session", metavar="SESSION", nargs=session, help="only this session")
        return added.add_argument

    subcommand("ls", _ls, "list the sessions, or the runs of one session", " numbers", "?")
    subcommand("verify", _verify, "compare all files with their checksums, and list damaged files", "", "?")
    example = " out --format pt --session numbers --points layers.1.output"
    add = subcommand("export", _export, "write runs as files of another format", example)
    add("to", metavar="TO", type=Path, help="directory for the files")
    add("--format", choices=get_args(Format), required=True, help="format of the files")
    add("--session", metavar="NAME", help="only this session")
    add("--run", dest="run_ids", metavar="ID", action="append", default=[], help="only this run; repeatable")
    add("--points", action="append", default=[], help="only these points, comma-separated; repeatable")
    add("--overwrite", action="store_true", help="overwrite existing files")
    text = "fetch a session from a server into the store's directory"
    add = subcommand("pull", _pull, text, " http://gpu-box:8000 numbers")
    add("url", metavar="URL", help="address of the server, such as http://gpu-box:8000")
    add("session", metavar="SESSION", help="session to fetch")
    add("--run", dest="run_ids", metavar="ID", action="append", default=[], help="only this run; repeatable")
    add("--api-key", metavar="KEY", help="API key (default: $VITRINE_API_KEY)")
    add("--owner", metavar="NAME", help="owner of the session, for admins (default: the key's own)")
    return made


if __name__ == "__main__":
    sys.exit(main())
