"""What is read is what was written, whatever its bits."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deployments.activations import read_run
from deployments.activations.index.index import Index
from deployments.activations.writer.writer import Writer
from deployments.points.patterns import Patterns

BITS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}


def drawn(data, *shape):
    """A tensor of any bits, NaN among them."""
    dtype, seed = data.draw(st.sampled_from([*BITS])), torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    info = torch.iinfo(BITS[dtype])
    return torch.randint(info.min, info.max, shape, generator=seed, dtype=BITS[dtype]).view(dtype)


@given(data=st.data(), rows=st.integers(1, 6), heads=st.integers(1, 3), sealed=st.booleans())
def test_what_is_read_is_what_was_written_bit_by_bit(make, data, rows, heads, sealed):
    points = {"a": drawn(data, rows, 5), "b": drawn(data, rows, heads, 4)}
    points["w"] = Patterns(drawn(data, heads * rows * (rows + 1) // 2), heads, range(rows))
    made = make("r", points, parts=data.draw(st.integers(1, rows)), tags={"k": "\u00e9"}, sampling={"top_p": 0.5})
    with tempfile.TemporaryDirectory() as folder:
        writer = Writer(Path(folder), Index.scanned(Path(folder)))
        stored = writer.submit(made.facts, made.batches).result()
        if sealed:
            writer.close()
        run = read_run(stored.points["a"].uri, "r")
        assert (run.facts, list(run)) == (made.facts, list(points))
        for name, point in stored.points.items():
            kept, read = (one.values if name == "w" else one for one in (points[name], run[name]))
            assert torch.equal(kept.view(BITS[kept.dtype]), read.view(BITS[kept.dtype]))
            assert (point.shape, point.dtype) == (tuple(run[name].shape), str(kept.dtype)[6:])
        writer.close()
    with pytest.raises(ValueError, match="step"):
        run["w"][::2]
