"""Record batches on their way through Ray."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa


class Packed:
    """A batch as an Arrow stream, which is the batch again once unpickled, over the same memory.

    Ray pickles the columns of a batch one by one: with 30 points that takes 0.5 ms longer, and reading twice as long.
    But a stream is a copy, so a batch of megabytes is better pickled as it is.
    """

    def __init__(self, batch: pa.RecordBatch) -> None:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as stream:
            stream.write_batch(batch)
        self._stream = sink.getvalue()

    @property
    def nbytes(self) -> int:
        """The bytes of the stream."""
        return int(self._stream.size)

    def __reduce__(self) -> tuple[Callable[[pa.Buffer], pa.RecordBatch], tuple[pa.Buffer]]:
        return _unpacked, (self._stream,)


def _unpacked(stream: pa.Buffer) -> pa.RecordBatch:
    return pa.ipc.open_stream(stream).read_next_batch()
