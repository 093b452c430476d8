"""Stored runs as files of other formats (pt, safetensors, npz, parquet, hf), written run by run."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import save_file

from deployments.activations.facts import Format
from deployments.activations.reader.loading import column_of, values_of
from deployments.activations.reader.sources import chosen, select
from deployments.activations.reader.tables import Layout, record_batches
from deployments.activations.segments.segments import RunBatches, whole_runs
from deployments.points.names import COLUMNS
from deployments.points.patterns import Patterns

_Write = Callable[[Path], None]
_Read = Callable[[], RunBatches]
FACTS = "run.facts"  # no point's name: those with a dot end in `input`, `output` or `weights`
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
    if format == "hf" and find_spec("datasets") is None:
        raise ValueError("the format hf needs the package datasets: pip install datasets")
    runs = [run] if isinstance(run, str) else run
    chosen_runs = select(*chosen(source, session, runs, None if points is None else set(points)))
    folder, writes = Path(to).expanduser(), dict[str, _Write]()
    for name, write in _tables(chosen_runs, format) if format in ("parquet", "hf") else _split(chosen_runs, format):
        if name in writes:
            raise ValueError(f"two points or runs would both be written to {name}: export them by themselves")
        if not overwrite and os.path.lexists(folder / name):
            raise FileExistsError(f"{folder / name} is there already: take another directory, or overwrite")
        writes[name] = write
    for name, write in writes.items():
        _make(folder / name, write)
    return [folder / name for name in writes]


def pt_name(session: str, run: str, point: str) -> str:
    """The name of a point's own file: `layers.12.input_layernorm.output` is `layer_12_input_layernorm_output` in it."""
    short = re.sub(r"\blayers\.(\d+)\.", r"layer_\1_", point)
    return _file_name(session, f"{run}_{short.replace('.', '_')}", "pt")


def _make(path: Path, write: _Write) -> None:
    """Write a file or directory, which has its name once it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".export-", dir=path.parent) as folder:
        write(unfinished := Path(folder) / path.name)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)  # a directory with files in it cannot be replaced
        unfinished.replace(path)


def _later(run: RunBatches) -> _Read:
    """Reads a run again once it is written: open ones take memory."""
    path, offset, types = run.path, run.offset, run.types
    return lambda: next(whole_runs(path, offset))._replace(types=types)


def _split(runs: Iterable[RunBatches], format: Format) -> Iterator[tuple[str, _Write]]:
    """The files of formats with files of their own for each run: their names, and what writes them."""
    for run in runs:
        session, id = run.facts.session_id, run.facts.run_id
        if format == "pt":
            for name in _names(run):
                yield pt_name(session, id, name), partial(_write_pt, _later(run), name)
        else:
            yield _file_name(session, id, format), partial(_write_tensors, _later(run), format)


def _names(run: RunBatches) -> list[str]:
    """A run's points, and `<point>.lengths` of its attention patterns."""
    return [*run.types, *(f"{name}.lengths" for name, kind in run.types.items() if None in kind.shape)]


def _tensor(run: RunBatches, name: str) -> torch.Tensor:
    """What a run has by a name, `[rows, ...features]`: a point, an int32 column, or lengths of attention patterns.

    Patterns are padded with zeros to `[rows, heads, widest]`; their lengths say how many tokens each row's token sees.
    """
    if name in run.types:
        values = values_of(run, name)
        return values.padded() if isinstance(values, Patterns) else values
    return column_of(run.batches, name) if name in COLUMNS else column_of(run.batches, "position") + 1


def _write_pt(read: _Read, name: str, path: Path) -> None:
    torch.save(_tensor(read(), name)[None], path)


def _write_tensors(read: _Read, format: Format, path: Path) -> None:
    """A run as named tensors: its points, `position`, `token_id`, and its facts as JSON."""
    run = read()
    tensors = {name: _tensor(run, name) for name in (*_names(run), "position", "token_id")}
    dtypes = {name: kind.dtype for name, kind in run.types.items()}
    facts = {FACTS: json.dumps(asdict(run.facts) | {"dtypes": dtypes})}
    if format == "safetensors":
        save_file(tensors, path, facts)
        return
    with path.open("wb") as file:  # numpy has no bfloat16
        wide = {name: value.float() if value.dtype == torch.bfloat16 else value for name, value in tensors.items()}
        arrays: dict[str, Any] = {name: value.numpy() for name, value in wide.items()} | facts
        np.savez(file, **arrays)


def _tables(runs: Iterable[RunBatches], format: Format) -> Iterator[tuple[str, _Write]]:
    """The files of formats with one for all runs of a session, model, points and dtypes, whose rows fit one table."""
    groups, numbers = dict[bytes, tuple[str, pa.Schema, list[_Read]]](), Counter[str]()
    for run in runs:
        session, schema = run.facts.session_id, run.batches[0].schema
        key = schema.serialize().to_pybytes()
        if key not in groups:
            numbers[session] += 1
            rest = str(numbers[session]) if numbers[session] > 1 else ""
            groups[key] = _file_name(session, rest, format), schema, []
        groups[key][2].append(_later(run))
    for name, schema, group in groups.values():
        yield name, partial(_write_parquet if format == "parquet" else _write_hf, schema, group)


def _rows(group: Sequence[_Read], layout: Layout) -> Iterator[pa.RecordBatch]:
    for read in group:
        run = read()
        yield from record_batches(run, [*COLUMNS, *run.types], layout)


def _write_parquet(schema: pa.Schema, group: Sequence[_Read], path: Path) -> None:
    """Few readers of Parquet know Arrow's extension types: points are lists."""
    rows = _rows(group, Layout())
    held, size = [first := next(rows)], first.nbytes
    described = first.schema.with_metadata(schema.metadata)
    # Only words repeat: activations are as good as random, and a dictionary of them costs time.
    with pq.ParquetWriter(path, described, use_dictionary=["run_id", "sample_id", "phase", "role"]) as writer:
        for batch in rows:
            if size >= _ROW_GROUP:
                writer.write_table(pa.Table.from_batches(held))
                held, size = [], 0
            held.append(batch)
            size += batch.nbytes
        writer.write_table(pa.Table.from_batches(held))


def _write_hf(schema: pa.Schema, group: Sequence[_Read], path: Path) -> None:
    """The library writes datasets from mapped files, so the rows are on disk a second time until it is done."""
    import datasets

    rows = _rows(group, Layout((torch.bfloat16,), nested=True))
    first, spool = next(rows), path.with_name("rows")
    with pa.ipc.new_stream(str(spool), first.schema.remove_metadata()) as writer:
        for batch in chain([first], rows):
            writer.write_batch(batch)
    datasets.Dataset.from_file(str(spool)).save_to_disk(str(path))


def _file_name(session: str, rest: str, suffix: str) -> str:
    """A file's name of ids and names that a file says: whatever they hold, they lead nowhere else."""
    name = f"activations_{session}_{rest}" if rest else f"activations_{session}"
    return f"{re.sub(r'[^A-Za-z0-9._-]', '_', name)}.{suffix}"
