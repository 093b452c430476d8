"""A malicious server's session is rejected as a whole: nothing of it is kept on disk."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pyarrow as pa
import pytest

from deployments.activations.reader.pulling import PullError, pull


def buffers(kind: pa.DataType, length: int, offsets: list[int], rest: bytes | pa.Array) -> pa.Array:
    """An array by its parts, which Arrow does not look at."""
    offset = pa.py_buffer(np.array(offsets, np.int64 if pa.types.is_large_list(kind) else np.int32).tobytes())
    if isinstance(rest, bytes):
        return pa.Array.from_buffers(kind, length, [None, offset, pa.py_buffer(rest)])
    return pa.Array.from_buffers(kind, length, [None, offset], children=[rest])


FAR = 1 << 30
COLUMNS = {
    "text beyond its buffer": buffers(pa.string(), 3, [0, 5, FAR, 7], b"hellowo"),
    "text that is no UTF-8": buffers(pa.string(), 1, [0, 2], b"\xff\xfe"),
    "lists beyond their values": buffers(
        pa.large_list(pa.float32()), 2, [0, FAR, 4], pa.array([1.0] * 4, pa.float32())
    ),
    "words that are not there": pa.DictionaryArray.from_arrays(
        pa.array([0, 99], pa.int32()), pa.array(["a"]), safe=False
    ),
}


def stream(column: pa.Array, metadata: dict[str, bytes] | None = None) -> bytes:
    batch = pa.record_batch([column], names=["x"])
    with pa.ipc.new_stream(out := io.BytesIO(), batch.schema) as writer:
        writer.write_batch(batch, custom_metadata=metadata)
    return out.getvalue()


@contextmanager
def server(body: bytes) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            first = int(self.headers["Range"].removeprefix("bytes=").partition("-")[0])
            self.send_response(206)
            self.send_header("ETag", '"1"')
            self.send_header("Content-Range", f"bytes {first}-{len(body) - 1}/{len(body)}")
            self.send_header("Content-Length", str(len(body) - first))
            self.end_headers()
            self.wfile.write(body[first:])

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{running.server_port}"
        finally:
            running.shutdown()
            thread.join()


@pytest.mark.parametrize("name", COLUMNS)  # to show such an array, as pytest does of a parameter, ends the process
def test_a_batch_whose_columns_point_beyond_their_buffers_is_not_kept(tmp_path, name):
    whole = stream(pa.array([1.0]))
    with server(whole + stream(COLUMNS[name])) as address, pytest.raises(PullError, match="not send an Arrow stream"):
        pull(address, "s", tmp_path, progress=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("sums", [b"a,b,c", b"\xff", b"0123456789abcdef"])
def test_checksums_that_are_none_or_fit_nothing_are_a_refusal_too(tmp_path, sums):
    with server(stream(pa.nulls(3), {"xxh3": sums})) as address, pytest.raises(PullError):
        pull(address, "s", tmp_path, progress=False)
    assert list(tmp_path.iterdir()) == []
