"""Bytes that change on disk are found and named by run and batch; other runs are read."""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deployments.activations import read_run
from deployments.activations.index.index import Index
from deployments.activations.segments.segments import DamagedError, batches_of
from deployments.activations.segments.verify import verify
from deployments.activations.writer.writer import Writer
from deployments.points.patterns import Patterns

REPOSITORY = Path(__file__).parents[3]
A, B, WEIGHTS = "layers.0.output", "layers.1.output", "layers.1.attention.weights"


@pytest.fixture(scope="module")
def sealed(make, tmp_path_factory):
    """A sealed file of two runs of three points, each in two batches."""
    root = tmp_path_factory.mktemp("store")
    with closing(Index.open(root)) as index:
        writer = Writer(root, index)
        for run in ("r0", "r1"):
            weights = Patterns(torch.randn(20), 2, range(4))
            points = {A: torch.randn(4, 3), B: torch.randn(4, 2).bfloat16(), WEIGHTS: weights}
            made = make(run, points, parts=2, sample_id=f"sample of {run}", tags={"of": run})
            writer.submit(made.facts, made.batches).result()
        writer.close()
    [path] = root.glob("*/*/*.arrow")
    return path


def flipped(content: bytes, path: Path, at: int, bit: int = 0) -> Path:
    data = bytearray(content)
    data[at] ^= 1 << bit
    path.write_bytes(data)
    return path


def place_of(data: bytes, value: torch.Tensor) -> int:
    return data.index(value.contiguous().view(torch.uint8).numpy().tobytes())


@given(data=st.data())
def test_a_bit_that_flips_in_a_value_is_found_and_named_and_other_runs_are_read(sealed, tmp_path_factory, data):
    content = sealed.read_bytes()
    run, name = data.draw(st.sampled_from(["r0", "r1"])), data.draw(st.sampled_from([A, B, WEIGHTS]))
    number = data.draw(st.integers(0, 3))
    row = read_run(sealed, run)[name][number].flatten()
    at = place_of(content, row) + data.draw(st.integers(0, row.nbytes - 1))
    path = flipped(content, tmp_path_factory.mktemp("broken") / "x.arrow", at, data.draw(st.integers(0, 7)))
    found = verify(path)
    assert (found.state, found.runs) == ("damaged", 1)
    assert found.reason == f"not as they were written: of {run} batch {number // 2}"
    with pytest.raises(DamagedError, match=f"{run}.*batch {number // 2}"):
        read_run(path, run, verify=True)
    other = "r1" if run == "r0" else "r0"
    assert read_run(path, other, verify=True).facts.tags == {"of": other}


def regions(path: Path) -> dict[str, list[int]]:
    """Bytes of each region of a file, but for padding and the footer's details, which no checksum covers."""
    data, ends, found = path.read_bytes(), [batch.end for batch in batches_of(path)], {}
    mapped = pa.memory_map(str(path)).read_buffer()
    for number, batch in enumerate(pa.ipc.open_stream(mapped.slice(8))):
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            storage = column.storage if isinstance(column, pa.ExtensionArray) else column
            for buffer in filter(None, storage.buffers()):
                if buffer.size and name not in ("text_offset", "role", "turn"):  # whose values are null
                    at = buffer.address - mapped.address
                    found[f"{name} of batch {number} at {at}"] = [at, at + buffer.size - 1]
    return found | {
        "magic": [*range(6)],
        "schema": [*range(data.index(b'{"adapter"'), data.index(b'{"adapter"') + 90, 7)],
        "metadata": [*range(data.index(b'{"run_id"'), data.index(b'{"run_id"') + 60, 7)],
        "framing": [ends[0], ends[0] + 4, ends[1] + 4],
        "end of the file": [*range(len(data) - 10, len(data))],
    }


def test_a_bit_that_flips_in_any_region_of_a_file_is_found(sealed, tmp_path):
    content = sealed.read_bytes()
    assert verify(sealed).ok
    assert [
        (region, at)
        for region, places in regions(sealed).items()
        for at in places
        if verify(flipped(content, tmp_path / "x.arrow", at, bit=at % 7)).state == "whole"
    ] == []


def test_the_reader_on_the_page_of_the_format_reads_every_run(sealed):
    page, names = (REPOSITORY / "docs" / "data.md").read_text().partition("## File format")[2], {}
    exec(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1], names)  # noqa: S102 - the page's own words
    read = list(names["read"](str(sealed)))
    assert [facts["run_id"] for facts, _ in read] == ["r0", "r1"]
    for facts, table in read:
        run = read_run(sealed, facts["run_id"])
        assert facts["sample_id"] == run.facts.sample_id
        bits = torch.from_numpy(table[B].combine_chunks().to_numpy_ndarray().copy())
        assert torch.equal(bits.view(torch.bfloat16).view(torch.uint8), run[B].view(torch.uint8))
        values = table[WEIGHTS].combine_chunks().flatten().to_numpy()
        assert values.tolist() == run[WEIGHTS].values.tolist()
