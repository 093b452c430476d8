"""Stored runs as files of other formats (pt, safetensors, npz, parquet, hf), written with bounded memory."""

from __future__ import annotations

import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Literal, get_args

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from deployments.activations.export.tensor_files import WRITERS, Member, points_of, tensors
from deployments.activations.files.places import File
from deployments.activations.reader.selection import Wanted, by_schema, checked, select
from deployments.activations.reader.sources import chosen
from deployments.activations.reader.tables import Layout, record_batches
from deployments.activations.segments.schema import segment_facts
from deployments.activations.segments.segments import WholeRun
from deployments.points.names import COLUMNS

Format = Literal["pt", "safetensors", "npz", "parquet", "hf"]
_Write = Callable[[Path], None]
_ROW_GROUP = 32 << 20  # bytes of rows that Parquet writes together


def export(
    source: str | os.PathLike[str],
    to: str | os.PathLike[str],
    format: Format,
    *,
    session: str | None = None,
    run: str | Sequence[str] | None = None,
    points: Sequence[str] | None = None,
    overwrite: bool = False,
) -> list[Path]:
    """Write stored runs as files of another format into a directory, which is made if it is missing.

    `pt` has a file for each run and point, one tensor `[1, rows, ...features]`; `safetensors` and `npz` one for each
    run, its points by their names, `position` and `token_id`; `parquet` and `hf` (a directory that
    `datasets.load_from_disk` opens) one for all runs of a session with the same points, a row for each token. bfloat16
    is float32 in `npz` and `hf`, and its bits in uint16 in `parquet`. Attention patterns are padded, `[rows, heads,
    widest]`, with `<point>.lengths` beside them (of `pt`, a file `..._lengths.pt`); `parquet` and `hf` have them as
    lists of their own length.

    `source`, `session`, `run` and `points` are as for `index_rows`. Returns the files; of `hf`, the directories.
    RequestError, a ValueError, if there is no such run or point; ValueError if there is no such format, or its package
    is not installed; FileNotFoundError if there is no such source or session; FileExistsError, before any is written,
    if a file is there already and `overwrite` is not set.
    """
    if format not in get_args(Format):
        raise ValueError(f"{format!r} is no format of an export: choose one of {', '.join(get_args(Format))}")
    if format == "hf":
        try:
            import datasets  # noqa: F401
        except ImportError as error:
            raise ValueError("the format hf needs the package datasets: pip install datasets") from error
    runs = [run] if isinstance(run, str) else run
    files, wanted = chosen(source, session, runs, None if points is None else set(points))
    for _ in checked(files, wanted):
        pass
    folder, written = Path(to).expanduser(), list[Path]()
    named = _tables if format in ("parquet", "hf") else _split
    _claim(folder, (name for name, _ in named(files, wanted, format)), overwrite)
    for name, write in named(files, wanted, format):
        _make(folder / name, write, overwrite)
        written.append(folder / name)
    return written


def pt_name(session: str, run: str, point: str) -> str:
    """The name of a point's own file: `layers.12.input_layernorm.output` is `layer_12_input_layernorm_output` in it."""
    short = re.sub(r"\blayers\.(\d+)\.", r"layer_\1_", point)
    return _file_name(session, f"{run}_{short.replace('.', '_')}", "pt")


def _claim(folder: Path, names: Iterable[str], overwrite: bool) -> None:
    """Refuse, before anything is written, names that are taken or that two files would have."""
    seen = set[str]()
    for name in names:
        if name in seen:
            raise ValueError(f"two points or runs would both be written to {name}: export them by themselves")
        seen.add(name)
        if not overwrite and os.path.lexists(folder / name):
            raise FileExistsError(f"{folder / name} is there already: take another directory, or overwrite")


def _make(path: Path, write: _Write, overwrite: bool) -> None:
    """Write a file or directory, which has its name once it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.part")
    try:
        write(unfinished)
        _claim(path.parent, [path.name], overwrite)  # another process may have been faster
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)  # a directory with files in it cannot be replaced
        unfinished.replace(path)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True) if unfinished.is_dir() else unfinished.unlink(missing_ok=True)


def _split(files: Sequence[File], wanted: Wanted, format: Format) -> Iterator[tuple[str, _Write]]:
    """The files of formats with files of their own for each run: their names, and what writes them."""
    for run in select(files, wanted):
        session, id = run.facts.session_id, run.facts.run_id
        if format == "pt":
            for member in points_of(run):
                yield pt_name(session, id, member.name), partial(_write_pt, member)
        else:
            yield _file_name(session, id, format), partial(_write_tensors, run, format)


def _write_pt(member: Member, path: Path) -> None:
    torch.save(member.make()[None], path)


def _write_tensors(run: WholeRun, format: Format, path: Path) -> None:
    with path.open("wb") as file:
        WRITERS[format](tensors([run], prefixed=False), file)


def _tables(files: Sequence[File], wanted: Wanted, format: Format) -> Iterator[tuple[str, _Write]]:
    """The same for each group of runs whose rows fit one table."""
    numbers = Counter[str]()
    for schema, group in by_schema(files):
        if next(select(group, wanted), None) is not None:
            session = segment_facts(schema).session_id
            numbers[session] += 1
            name = _file_name(session, str(numbers[session]) if numbers[session] > 1 else "", format)
            yield name, partial(_write_parquet if format == "parquet" else _write_hf, schema, group, wanted)


def _rows(schema: pa.Schema, files: Sequence[File], wanted: Wanted, layout: Layout) -> Iterator[pa.RecordBatch]:
    for run in select(files, wanted):
        names = [name for name in schema.names if name in COLUMNS or name in run.types]
        yield from record_batches(run, names, layout)


def _write_parquet(schema: pa.Schema, files: Sequence[File], wanted: Wanted, path: Path) -> None:
    """Few readers of Parquet know Arrow's extension types: points are lists."""
    rows = _rows(schema, files, wanted, Layout())
    first = next(rows)
    held, size = [first], first.nbytes
    said = first.schema.with_metadata(schema.metadata)
    # Only words repeat: activations are as good as random, and a dictionary of them costs time.
    with pq.ParquetWriter(path, said, use_dictionary=["run_id", "sample_id", "phase"]) as writer:
        for batch in rows:
            if size >= _ROW_GROUP:
                writer.write_table(pa.Table.from_batches(held))
                held, size = [], 0
            held.append(batch)
            size += batch.nbytes
        writer.write_table(pa.Table.from_batches(held))


def _write_hf(schema: pa.Schema, files: Sequence[File], wanted: Wanted, path: Path) -> None:
    """The library writes datasets from mapped files, so the rows are on disk a second time until it is done."""
    import datasets

    rows = _rows(schema, files, wanted, Layout((torch.bfloat16,), nested=True))
    first = next(rows)
    spool = path.with_name(f"{path.name}.rows")
    bars = datasets.utils.are_progress_bars_disabled()
    datasets.utils.disable_progress_bars()  # as the other formats draw none
    try:
        with pa.ipc.new_stream(str(spool), first.schema.remove_metadata()) as writer:
            for batch in chain([first], rows):
                writer.write_batch(batch)
        datasets.Dataset.from_file(str(spool)).save_to_disk(str(path))
    finally:
        spool.unlink(missing_ok=True)
        if not bars:
            datasets.utils.enable_progress_bars()


def _file_name(session: str, rest: str, suffix: str) -> str:
    """A file's name of ids and names that a file says: whatever they hold, they lead nowhere else."""
    name = f"activations_{session}_{rest}" if rest else f"activations_{session}"
    return f"{re.sub(r'[^A-Za-z0-9._-]', '_', name)}.{suffix}"
