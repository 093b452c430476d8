"""`python -m deployments.activations`: look through, check, export and fetch stored activations."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Collection, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deployments.activations.facts import StoreError, check_session_id
from deployments.activations.filters import EVERYTHING, Filter, tag_pairs
from deployments.activations.printing import size, table, time
from deployments.options import STORE_VARIABLE, default_store, home

if TYPE_CHECKING:
    from deployments.activations.files.places import Place

    AnyRoot = Path | Place

FORMATS = ("pt", "safetensors", "npz", "parquet", "hf")


class UserError(Exception):
    """What the user can put right."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; 0 where it did what was asked, 1 where it could not, 2 where it was not understood."""
    from deployments.activations.files.permissions import restrict
    from deployments.activations.reader.pulling import PullError

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
    filter = _filter(args)
    if args.runs:
        _print_runs(_catalogue(args.dir).runs(filter, None), "session_id")
        return 0
    found = _catalogue(args.dir).sessions(sys.maxsize, None, filter)
    pins = _pins(args.dir)
    rows = [
        (
            *(one["id"], one["runs"], one["tokens"], size(one["bytes"]), time(one["updated"])),
            *("pinned" if one["id"] in pins else None, ", ".join(one["models"])),
        )
        for one in found
    ]
    table(("session", "runs", "tokens", "size", "updated", "pinned", "models"), rows, right="runs tokens size")
    return 0


def _show(args: argparse.Namespace) -> int:
    filter, catalogue = _filter(args), _catalogue(args.dir)
    found = catalogue.session(check_session_id(args.session), filter=filter)
    if found is None and (entry := catalogue.find(args.session)):
        found = catalogue.session(entry.facts.session_id, filter=filter._replace(runs=(args.session,)))
    if found is None:
        that_fits = "" if filter == EVERYTHING else " with a run that fits"
        raise UserError(f"there is no session {args.session!r}{that_fits} in {args.dir}")
    total = f"{len(found['runs'])} runs, {found['tokens']} tokens, {size(found['bytes'])}"
    print(f"{found['id']}: {total}, {time(found['created'])} to {time(found['updated'])}\n")
    kinds = {(name, _shape(point), point["dtype"]) for run in found["runs"] for name, point in run["points"].items()}
    table(("point", "shape", "dtype"), sorted(kinds))
    print()
    _print_runs(found["runs"])
    print()
    files = [
        (file["uri"].rpartition("/")[2], size(file["bytes"]), "sealed" if file["sealed"] else "open")
        for file in found["files"]
    ]
    table(("file", "size", ""), files, right="size")
    return 0


def _print_runs(runs: Sequence[dict[str, Any]], *first: str) -> None:
    said = {name: name.removesuffix("_id") for name in (*first, "run_id")}
    said |= {"prompt_tokens": "prompt", "tokens": "tokens", "finish_reason": "finish", "model": "model"}
    said |= {"sample_id": "sample"}
    rows = [(*(run[name] for name in said), time(run["created"]), _tags(run["tags"])) for run in runs]
    table((*said.values(), "created", "tags"), rows, right="prompt tokens")


def _export(args: argparse.Namespace) -> int:
    from deployments.activations.export.exports import export

    files = export(
        args.dir,
        args.to,
        args.format,
        session=args.session,
        run=_apart(args.run_ids),
        points=_apart(args.points),
        overwrite=args.overwrite,
    )
    written = [path for file in files for path in (file.iterdir() if file.is_dir() else [file])]
    print(f"{len(written)} files, {size(sum(path.stat().st_size for path in written))}, in {args.to}")
    return 0


def _verify(args: argparse.Namespace) -> int:
    from deployments.activations.reader.sources import shards
    from deployments.activations.segments.verify import verify

    rows, bad = list[tuple[Any, ...]](), 0
    for path in shards(args.dir, args.session):
        found = verify(path)
        bad += not found.ok
        rest = "".join(f"; of {run}, {count} rows" for run, count in found.unfinished.items())
        name = str(path).removeprefix(f"{args.dir}/")
        rows.append((name, size(path.size), found.state, found.runs, found.rows, found.reason + rest))
    table(("file", "size", "state", "runs", "rows", ""), rows, right="size runs rows")
    if bad:
        print(f"\n{bad} of {len(rows)} files are not whole; their whole runs can be read", file=sys.stderr)
    return 1 if bad else 0


def _pull(args: argparse.Namespace) -> int:
    from deployments.activations.reader.pulling import pull

    key = args.api_key or os.environ.get("VITRINE_API_KEY") or None
    if not isinstance(args.dir, Path):
        raise UserError(f"--dir {args.dir} is in object storage: fetch the session into a directory")
    folder = pull(args.url, args.session, args.dir, runs=args.run_ids, points=args.points, api_key=key)
    print(f"{size(sum(file.stat().st_size for file in folder.iterdir()))} in {folder}")
    return 0


def _at(place: str, is_new: bool) -> AnyRoot:
    """The store that `--dir` names; unless it may be new, it is there."""
    from deployments.activations.files.uris import place_of

    if "://" in place:
        return place_of(place)
    root = Path(place).expanduser()
    if is_new:
        return root
    if not root.is_dir():
        raise UserError(f"there is no store at {root}: name one with --dir")
    return root.resolve()


def _catalogue(root: AnyRoot) -> Any:
    from deployments.activations.catalogue.catalogue import Catalogue

    return Catalogue.copied(root)  # a server may run, whose database is its own


def _pins(root: AnyRoot) -> Collection[str]:
    from deployments.activations.catalogue.buckets import catalogue_of
    from deployments.activations.state.pins import Pins

    if isinstance(root, Path):
        return Pins(root, read_only=True).names()
    pinned = "SELECT session FROM records WHERE kind = 'pin' AND value IS NOT NULL"
    return {session for (session,) in catalogue_of(root).execute(pinned)}


def _filter(args: argparse.Namespace) -> Filter:
    since, until = (
        seconds(text, name) if text else None for text, name in ((args.since, "since"), (args.until, "until"))
    )
    return Filter(None, args.model, since, until, args.sample, tag_pairs(args.tags))


def seconds(text: str, name: str) -> float:
    """A time as Unix seconds: those, or an ISO date with or without a time of day, local where it names no zone.

    Raises:
        ValueError: It is neither; names `--name`.
    """
    try:
        return float(text) if text.replace(".", "", 1).isdigit() else datetime.fromisoformat(text).timestamp()
    except ValueError as error:
        raise ValueError(f"--{name} {text!r} must be an ISO date, such as 2026-11-20T18:00, or Unix seconds") from error


def _shape(point: dict[str, Any]) -> str:
    return "[" + ", ".join("tokens" if size is None else str(size) for size in point["shape"][1:]) + "]"


def _tags(tags: dict[str, str]) -> str | None:
    return ", ".join(f"{name}={value}" for name, value in tags.items()) or None


def _apart(values: Sequence[str]) -> list[str] | None:
    return [part for value in values for part in value.split(",") if part] or None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m deployments.activations", description=__doc__, allow_abbrev=False)
    parser.set_defaults(prog="deployments.activations")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Any, help: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=help, description=help, allow_abbrev=False)
        where = "the store's directory, or its archive's URI, s3://bucket/prefix?region=...; by default"
        folder = home() / "activations"
        added.add_argument("--dir", default=default_store(), help=f"{where} ${STORE_VARIABLE}, else {folder}")
        added.set_defaults(run=run)
        return added

    def chosen(added: argparse.ArgumentParser) -> None:
        added.add_argument("--run", dest="run_ids", action="append", default=[], help="a run alone; may be repeated")
        added.add_argument("--points", action="append", default=[], help="points alone, apart by commas or repeated")

    def filtered(added: argparse.ArgumentParser) -> None:
        added.add_argument("--model", help="runs of this model alone")
        added.add_argument("--since", help="created then or later: an ISO date or Unix seconds")
        added.add_argument("--until", help="created before: likewise")
        added.add_argument("--sample", help="runs of this sample alone")
        added.add_argument("--tag", dest="tags", action="append", default=[], help="name=value; may be repeated")

    added = command("ls", _ls, "list the sessions")
    added.add_argument("--runs", action="store_true", help="list the runs instead, the oldest first")
    filtered(added)
    added = command("show", _show, "a session's points, runs and files")
    added.add_argument("session", help="or the id of a run, to show it alone")
    filtered(added)
    added = command("export", _export, "write runs as files of another format")
    added.add_argument("to", type=Path, help="the directory for the files")
    added.add_argument("--format", choices=FORMATS, required=True)
    added.add_argument("--session", help="this session alone")
    added.add_argument("--overwrite", action="store_true", help="write files anew that are there already")
    chosen(added)
    added = command("verify", _verify, "read everything, and say what is whole and what can still be read")
    added.add_argument("session", nargs="?")
    added = command("pull", _pull, "fetch a session from a server into the store's directory")
    added.add_argument("url", help="the server's address, http://host:8000")
    added.add_argument("session")
    added.add_argument("--api-key", help="by default the variable VITRINE_API_KEY")
    chosen(added)
    return parser


if __name__ == "__main__":
    sys.exit(main())
