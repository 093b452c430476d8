"""Stored runs as files of other formats: pt, safetensors, npz, parquet, hf; written with bounded memory."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal, get_args

import pyarrow as pa
import pyarrow.parquet as pq

from deployments.activations.export.encodings import as_lone_pt, as_npz, as_safetensors
from deployments.activations.export.hf_datasets import check_installed, write_dataset
from deployments.activations.export.named_tensors import points_of, tensors
from deployments.activations.export.parts import Parts
from deployments.activations.files.places import File
from deployments.activations.reader.selection import Wanted, by_schema, checked, select
from deployments.activations.reader.sources import chosen
from deployments.activations.segments.schema import point_types, shard_facts
from deployments.activations.segments.segments import WholeRun
from deployments.points.names import COLUMNS

Format = Literal["pt", "safetensors", "npz", "parquet", "hf"]
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
    """Write stored runs as files of another format.

    `pt`: `activations_{session}_{run}_layer_12_input_layernorm_output.pt` for each run and point, one tensor
    `[1, rows, ...features]`. `safetensors`, `npz`: `activations_{session}_{run}.npz` for each run, with each point by
    its name, `position` and `token_id`; numpy has no bfloat16, which becomes float32 there, of the same values.
    `parquet`: `activations_{session}.parquet`, and `..._2.parquet` and so on for runs of other points; a row for each
    token, points as lists of fixed size, bfloat16 as its bits in uint16 with the dtype in the field's metadata.
    `hf`: the same as directories `activations_{session}.hf` that `datasets.load_from_disk` opens, points as lists
    nested as they are shaped, bfloat16 as float32 of the same values.

    Attention patterns are padded, `[rows, heads, widest]`, with `<point>.lengths` beside them (of `pt`, a file
    `..._lengths.pt`); `parquet` and `hf` have them as lists of their own length.

    Args:
        source: A store's or session's directory, or one file, as a path or `file://` URI; or the id of a run.
        to: The directory for the files; made if it is missing.
        format: Of the files.
        session: This session's runs alone.
        run: These runs alone.
        points: These points alone.
        overwrite: Whether files that are there may be written anew.

    Returns:
        The files; of `hf`, the directories.

    Raises:
        RequestError: There is no such run or point; a ValueError.
        ValueError: There is no such format, or the package that it needs is not installed.
        FileNotFoundError: There is no such source or session.
        FileExistsError: A file is there already; then none is written.
    """
    if format not in get_args(Format):
        raise ValueError(f"{format!r} is no format of an export: choose one of {', '.join(get_args(Format))}")
    files, runs = chosen(source, session, [run] if isinstance(run, str) else run)
    wanted = Wanted(session, None if runs is None else set(runs), None if points is None else set(points))
    target = _Target(Path(to).expanduser(), overwrite)
    if format in ("parquet", "hf"):
        return _tables(files, wanted, target, format)
    split = _split(format)
    target.claim(name for found in checked(files, wanted) for name, _ in split(found))
    for found in select(files, wanted):
        for name, encoded in split(found):
            with target.new(name) as file:
                for piece in encoded().read():
                    file.write(piece)
    return target.written


def pt_name(session: str, run: str, point: str) -> str:
    """The name of a point's own file: `layers.12.input_layernorm.output` is `layer_12_input_layernorm_output` in it."""
    short = re.sub(r"\blayers\.(\d+)\.", r"layer_\1_", point)
    return _file_name(session, f"{run}_{short.replace('.', '_')}", "pt")


class _Target:
    """A directory that files are written to, each whole or not at all."""

    def __init__(self, folder: Path, overwrite: bool) -> None:
        self.written = list[Path]()
        self._folder = folder
        self._overwrite = overwrite

    def claim(self, names: Iterator[str]) -> None:
        """Refuse, before anything is written, names that are taken or that two files would have."""
        seen = set[str]()
        for name in names:
            if name in seen:
                raise ValueError(f"two points or runs would both be written to {name}: export them by themselves")
            seen.add(name)
            if not self._overwrite and os.path.lexists(self._folder / name):
                raise FileExistsError(f"{self._folder / name} is there already: take another directory, or overwrite")

    @contextlib.contextmanager
    def new(self, name: str) -> Iterator[IO[bytes]]:
        """A file to write; it has its name once it is whole."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path, unfinished = self._folder / name, self._folder / f".{name}.part"
        try:
            with unfinished.open("wb") as file:
                yield file
            self.claim(iter([name]))  # somebody else may have been quicker
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
        self.written.append(path)

    @contextlib.contextmanager
    def new_folder(self, name: str) -> Iterator[Path]:
        """A directory to make; it has its name once it is whole."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path, unfinished = self._folder / name, self._folder / f".{name}.part"
        try:
            yield unfinished
            self.claim(iter([name]))
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)  # a directory with files in it cannot be replaced
            unfinished.replace(path)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        self.written.append(path)


_Encoder = Callable[[], Parts]


def _split(format: Format) -> Callable[[WholeRun], list[tuple[str, _Encoder]]]:
    """How a run becomes files: (run) -> their names, and what makes what is in them."""

    def by_point(run: WholeRun) -> list[tuple[str, _Encoder]]:
        session, id = run.facts.session_id, run.facts.run_id
        return [(pt_name(session, id, member.name), partial(as_lone_pt, member)) for member in points_of(run)]

    def by_run(run: WholeRun) -> list[tuple[str, _Encoder]]:
        encode = as_safetensors if format == "safetensors" else as_npz
        name = _file_name(run.facts.session_id, run.facts.run_id, format)
        return [(name, lambda: encode(tensors([run], prefixed=False)))]

    return by_point if format == "pt" else by_run


def _tables(files: Sequence[File], wanted: Wanted, target: _Target, format: Literal["parquet", "hf"]) -> list[Path]:
    """Runs whose rows fit one table, together."""
    if format == "hf":
        check_installed()
    for _ in checked(files, wanted):
        pass
    groups = dict[str, list[File]]()
    numbers = dict[str, int]()
    for schema, group in by_schema(files):
        session = shard_facts(schema).session_id
        if next(select(group, wanted), None) is not None:
            number = numbers[session] = numbers.get(session, 0) + 1
            groups[_file_name(session, str(number) if number > 1 else "", format)] = group
    target.claim(iter(groups))
    for name, group in groups.items():
        if format == "hf":
            with target.new_folder(name) as folder:
                write_dataset(folder, select(group, wanted))
        else:
            with target.new(name) as file:
                _write_table(file, select(group, wanted))
    return target.written


def _write_table(file: IO[bytes], runs: Iterator[WholeRun]) -> None:
    """Runs whose rows fit one table, as Parquet."""
    held, size = list[pa.RecordBatch](), 0
    first = next(runs)
    schema = _table_schema(first)
    # Only words repeat: activations are as good as random, and a dictionary of them costs time.
    words = ["run_id", "sample_id", "phase"]
    with pq.ParquetWriter(file, schema, use_dictionary=words) as writer:
        for run in (one for some in ([first], runs) for one in some):
            for batch in run.batches:
                rows = batch.select(schema.names)
                columns = [_plain(rows[name]).cast(schema.field(name).type) for name in schema.names]
                held.append(pa.record_batch(columns, schema=schema))
                size += held[-1].nbytes
                if size >= _ROW_GROUP:
                    writer.write_table(pa.Table.from_batches(held))
                    held, size = [], 0
        if held:
            writer.write_table(pa.Table.from_batches(held))


def _table_schema(run: WholeRun) -> pa.Schema:
    """The columns of a run's rows without Arrow's extension types, which few readers of Parquet know."""
    schema = run.batches[0].schema
    fields = [schema.field(name) for name in COLUMNS if name in schema.names]  # older files have fewer
    for name, kind in point_types(schema).items():
        if name in run.types:
            type = schema.field(name).type
            type = type.storage_type if isinstance(type, pa.BaseExtensionType) else type
            said = {"dtype": kind.dtype, "shape": json.dumps(kind.shape)}
            fields.append(pa.field(name, type, metadata=said))
    return pa.schema(fields, metadata=schema.metadata)


def _plain(column: Any) -> Any:
    return column.storage if isinstance(column, pa.ExtensionArray) else column


def _file_name(session: str, rest: str, suffix: str) -> str:
    """A file's name of ids and names that a file says: whatever they hold, they lead nowhere else."""
    name = f"activations_{session}_{rest}" if rest else f"activations_{session}"
    return f"{re.sub(r'[^A-Za-z0-9._-]', '_', name)}.{suffix}"
