"""Stored runs as numpy arrays, from Arrow files in the format of docs/data.md."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from vitrine.points import ROLES, layer_of, listed, matching
from vitrine.runs.files import MAGIC

Rows = npt.NDArray[np.float32] | list[npt.NDArray[np.float32]]
Framework = Literal["numpy", "torch"]


class Run(Mapping[str, Rows]):
    """One stored run: point -> float32 activation vectors `[tokens, hidden]`, and the run's description.

    Heads are `[tokens, heads, head_dim]`; an attention pattern is a list with `[heads, tokens seen]` for each token.
    With `load(..., framework="torch")`, they are tensors of the stored data types.

    Attributes:
        facts: Run id, session, model, tags, sampling, text and so on: docs/data.md lists them.
        positions: The index of each recorded token in prompt + completion.
        token_ids: The id of each recorded token.
        phases: `prompt` or `generated` for each token.
        roles: `system`, `user`, `assistant`, `tool`, `template` or `reasoning` for each token; None if the run is not
            a chat, or the template does not show where messages are.
        dtypes: The stored data type of each point.

    Examples:
        >>> answer = server.complete("Ann has 3 boxes", max_tokens=2, capture={"points": ["layers.1.output"]})
        >>> run = vitrine.load(answer, server=server)
        >>> run["layers.1.output"].shape == (len(run.positions), 192)
        True
    """

    def __init__(self, facts: dict[str, Any], table: pa.Table, shared: Mapping[str, Any]) -> None:
        self.facts = facts
        self.run_id: str = facts["run_id"]
        self.positions: npt.NDArray[np.int32] = table["position"].to_numpy()
        self.token_ids: npt.NDArray[np.int32] = table["token_id"].to_numpy()
        self.phases: list[str] = table["phase"].to_pylist()
        self.roles = _roles(table)
        self.dtypes: dict[str, str] = shared["dtypes"]
        self._values = _columns(table, shared)
        self._layers: int | None = shared.get("layers")  # of the model
        self._framework: Framework = "numpy"

    def __getitem__(self, point: str) -> Rows:
        try:
            (name,) = self.matching(point)
        except (LookupError, ValueError) as error:
            raise KeyError(f"{point!r} is not a point of {self.run_id}, which has {listed(self)}") from error
        rows = self._values[name]()
        return rows if self._framework == "numpy" else _tensors(rows, self.dtypes[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def matching(self, points: str | Iterable[str] | None) -> list[str]:
        """The run's points that match names or patterns, in their order; None means all.

        Raises:
            LookupError: The run has no such point.
            ValueError: A layer is negative, and the run does not contain its model's number of layers.

        Examples:
            >>> acts = server.collect(["Ann has"], "resid_post")
            >>> server.load_runs(acts.run_ids)[0].matching("layers.-1.output")
            ['layers.5.output']
        """
        if points is None:
            return list(self)
        names: dict[str, None] = {}
        for pattern in [points] if isinstance(points, str) else points:
            if not (meant := matching(pattern, self._values, self._layers)):
                raise LookupError(f"{pattern!r} is none of the recorded points {listed(self)}")
            names |= dict.fromkeys(sorted(meant, key=lambda name: layer_of(name) or 0))
        return list(names)

    def only(self, points: str | Iterable[str] | None) -> Run:
        """The same run with only the points that `matching` returns.

        Examples:
            >>> acts = server.collect(["Ann has"], "resid_post")
            >>> list(server.load_runs(acts.run_ids)[0].only("blocks.2.hook_resid_post"))
            ['layers.2.output']
        """
        selection = copy.copy(self)
        selection._values = {name: self._values[name] for name in self.matching(points)}
        return selection

    def __repr__(self) -> str:
        return f"Run({self.run_id!r}, {len(self.positions)} tokens, {len(self)} points)"


def detached(run: Run) -> Run:
    """The same run with its points as arrays of their own, so that the bytes that it was read from can be freed."""
    duplicate = copy.copy(run)
    duplicate.positions, duplicate.token_ids = run.positions.copy(), run.token_ids.copy()
    duplicate._values = {name: partial(_same, rows) for name, rows in run.items()}
    return duplicate


def in_framework(run: Run, framework: Framework) -> Run:
    """The same run, with its points as arrays of numpy or tensors of torch.

    Raises:
        ValueError: It is another framework.
    """
    if framework not in get_args(Framework):
        raise ValueError(f"framework: {framework!r} is neither numpy nor torch")
    converted = copy.copy(run)
    converted._framework = framework
    return converted


def of_bytes(data: bytes | bytearray, wanted: Collection[str] | None = None) -> list[Run]:
    """Read the complete runs of a file's head and some of its batches; only the `wanted` ones."""
    source = pa.BufferReader(data)
    source.seek(len(MAGIC))
    return list(_runs(source, wanted))


def of_files(path: Path, wanted: Collection[str] | None = None) -> Iterator[Run]:
    """Read the complete runs of an Arrow file, or of all files in a session's directory.

    Raises:
        FileNotFoundError: There is no such file, or no Arrow file in the directory.
    """
    files = sorted(path.glob("*.arrow")) if path.is_dir() else [path]
    if not files:
        raise FileNotFoundError(f"{path} holds no Arrow file")
    for file in files:
        source = pa.memory_map(str(file))
        source.seek(len(MAGIC))  # contains a stream, even without a footer
        try:
            yield from _runs(source, wanted)
        except pa.ArrowInvalid:  # truncated by a crash after its last complete run
            continue


def _runs(source: Any, wanted: Collection[str] | None) -> Iterator[Run]:
    """Read the complete runs of one stream, each as soon as its last batch is read."""
    stream = pa.ipc.open_stream(source)
    shared = json.loads(stream.schema.metadata[b"vitrine"])
    batches: list[pa.RecordBatch] = []
    for batch, metadata in stream.iter_batches_with_custom_metadata():
        batches = [batch] if metadata[b"batch"] == b"0" else [*batches, batch]
        if b"run" in metadata and (wanted is None or metadata[b"run_id"].decode() in wanted):
            table = pa.Table.from_batches(batches)
            table.validate(full=True)  # damaged offsets would be read outside of the bytes
            yield Run(json.loads(metadata[b"run"]), table, shared)


def _columns(table: pa.Table, shared: Mapping[str, Any]) -> dict[str, Callable[[], Rows]]:
    """Point -> a function that reads its rows."""
    dtypes, heads = shared["dtypes"], shared.get("heads", {})
    points = [name for name in table.column_names if name in dtypes]  # in the order of execution
    return {point: partial(_column, table[point], dtypes[point], heads.get(point)) for point in points}


def _roles(table: pa.Table) -> list[str] | None:
    roles = table["role"].to_pylist() if "role" in table.column_names else [None]  # older servers store none
    return None if None in roles else [ROLES[role or 0] for role in roles]


def _same(rows: Rows) -> Rows:
    return rows


def _column(column: pa.ChunkedArray, dtype: str, heads: int | None) -> Rows:
    if heads is None:
        return np.concatenate([_float32(chunk.to_numpy_ndarray(), dtype) for chunk in column.chunks])
    rows = (_float32(row.values.to_numpy(), dtype) for chunk in column.chunks for row in chunk)
    return [row.reshape(heads, -1) for row in rows]


def _float32(values: npt.NDArray[Any], dtype: str) -> npt.NDArray[np.float32]:
    if dtype == "bfloat16":  # stored as its bits, which are the upper half of a float32
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


def _tensors(rows: Rows, dtype: str) -> Any:
    import torch  # only here: a client needs no torch

    if isinstance(rows, list):
        return [_tensors(row, dtype) for row in rows]
    return torch.from_numpy(rows).to(getattr(torch, dtype))
