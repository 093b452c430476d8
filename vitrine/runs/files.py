"""Cuts single runs out of stored activation files by their bytes alone.

Lists of runs give each run's `file`, `offset` and `bytes`. The run's record batches are the bytes
`[offset, offset + bytes)` of the file, which a server sends as byte ranges. They can only be read after the file's
head, which has the schema and the dictionary: fetch the file's beginning (64 KiB are nearly always enough), and more
while `head_length` gives None. `stream_of` joins head and run. The first run of a file has `offset` 0, and its bytes
begin with the head.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa

MAGIC = b"ARROW1\0\0"  # begins every file; the stream of messages comes after it
_END = b"\xff\xff\xff\xff\0\0\0\0"  # ends a stream

Entry = Mapping[str, Any]  # a run as a server lists it


def head_length(data: bytes) -> int | None:
    """How many bytes of a file come before its first record batch, by the file's beginning; None if that is too short.

    Raises:
        ValueError: It is not the beginning of a file of activations.
    """
    if not MAGIC.startswith(data[: len(MAGIC)]):
        raise ValueError("these bytes do not begin an Arrow file")
    source = pa.BufferReader(data)
    try:
        source.seek(len(MAGIC))
        kinds = [pa.ipc.read_message(source).type for _ in range(2)]
    except (pa.ArrowException, EOFError, OSError):
        return None
    if kinds != ["schema", "dictionary"]:
        raise ValueError("these bytes do not begin a file of activations")
    return int(source.tell())


def stream_of(head: bytes, run: bytes) -> bytes:
    """An Arrow IPC stream of one run: of its file's head and its own bytes, which may begin with the head."""
    return (run if run.startswith(MAGIC) else head + run)[len(MAGIC) :] + _END


def spans(head: int, runs: Iterable[Entry]) -> list[tuple[int, int]]:
    """The ranges of a file's bytes that have some listed runs, without the `head` bytes at its beginning.

    Adjacent runs are in one range; the ranges ascend.
    """
    ranges: list[tuple[int, int]] = []
    for first, end in sorted((max(head, run["offset"]), run["offset"] + run["bytes"]) for run in runs):
        if ranges and ranges[-1][1] == first:
            first = ranges.pop()[0]
        ranges.append((first, end))
    return ranges
