"""Values that change on disk are found and named by run and point; the others are read."""

from __future__ import annotations

import re
import shutil
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_hexdigest

import deployments.activations
from deployments.activations import load
from deployments.activations.catalogue.catalogue import Catalogue
from deployments.activations.export.arrow_streams import as_arrow
from deployments.activations.files.places import DamagedError
from deployments.activations.reader.selection import Wanted
from deployments.activations.segments.batches import batches_of
from deployments.activations.segments.verify import verify
from deployments.activations.writer.writer import Writer
from deployments.points.patterns import Patterns

REPOSITORY = Path(deployments.activations.__file__).parents[2]
A, B, WEIGHTS = "layers.0.output", "layers.1.output", "layers.1.attention.weights"


@pytest.fixture(scope="module")
def sealed(make, tmp_path_factory):
    """A sealed file of two runs of three points, each in two batches."""
    torch.manual_seed(0)
    root = tmp_path_factory.mktemp("store")
    writer = Writer(root, Catalogue.rebuild(root))
    for run in ("r0", "r1"):
        points = {
            A: torch.randn(4, 3),
            B: torch.randn(4, 2).bfloat16(),
            WEIGHTS: Patterns(torch.randn(20), 2, range(4)),
        }
        made = make(run, points, parts=2, sample_id=f"sample of {run}", tags={"of": run})
        writer.submit(made.facts, made.batches).result()
    writer.close()
    [path] = root.glob("session/*.arrow")
    return path


@pytest.fixture
def segment(sealed, tmp_path):
    """A copy of it."""
    return Path(shutil.copy(sealed, tmp_path / "segment.arrow"))


def place_of(data: bytes, value: torch.Tensor) -> int:
    return data.index(value.contiguous().view(torch.uint8).numpy().tobytes())


@given(data=st.data())
def test_a_bit_that_flips_in_a_value_is_found_and_named_and_all_else_is_read(sealed, tmp_path_factory, data):
    content = sealed.read_bytes()
    points = {(run, name): load(sealed, run)[name] for run in ("r0", "r1") for name in (A, B)}
    run, name = data.draw(st.sampled_from(["r0", "r1"])), data.draw(st.sampled_from([A, B]))
    row = points[run, name][data.draw(st.integers(0, 3))]
    at = place_of(content, row) + data.draw(st.integers(0, row.nbytes - 1))
    broken = bytearray(content)
    broken[at] ^= 1 << data.draw(st.integers(0, 7))
    path = tmp_path_factory.mktemp("broken") / "x.arrow"
    path.write_bytes(broken)
    found = verify(path)
    assert (found.state, found.runs, found.damaged) == ("damaged", 1, {run: [name]})
    assert run in found.reason
    assert name in found.reason
    with pytest.raises(DamagedError, match=f"{run}: the values of {re.escape(name)} .*can be read"):
        load(path, run, verify=True)
    others = [point for point in (A, B) if point != name]
    assert torch.equal(load(path, run, others, verify=True)[others[0]], points[run, others[0]])
    other = "r1" if run == "r0" else "r0"
    assert torch.equal(load(path, other, verify=True)[name], points[other, name])


def flipped(path: Path, at: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def test_a_tag_that_changes_is_found_and_its_run_is_named(segment):
    at = segment.read_bytes().rindex(b'"of": "r1"') + 8  # in the second run's
    flipped(segment, at)
    found = verify(segment)
    assert (found.state, found.runs, found.damaged) == ("damaged", 1, {"r1": ["facts"]})
    with pytest.raises(DamagedError, match="run r1: .*tags"):
        load(segment, "r1", verify=True)
    assert load(segment, "r0", verify=True).facts.tags == {"of": "r0"}


def buffers(path: Path) -> dict[str, list[tuple[int, int]]]:
    """Where each column's buffers lie: place and bytes, as they lie in the file."""
    data, found = pa.memory_map(str(path)).read_buffer(), {}
    for batch in pa.ipc.open_stream(data.slice(8)):
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            storage = column.storage if isinstance(column, pa.ExtensionArray) else column
            places = [(buffer.address - data.address, buffer.size) for buffer in storage.buffers() if buffer]
            found.setdefault(name, []).extend(places)
    return found


def regions(path: Path) -> dict[str, list[int]]:
    """Bytes of each region of a file."""
    data, ends = path.read_bytes(), [message.end for message in batches_of(path)]
    held = sorted(place for places in buffers(path).values() for place in places)
    padding = [at for (one, size), (other, _) in pairwise(held) for at in range(one + size, min(other, one + size + 8))]
    tail = len(data) - 10 - int.from_bytes(data[-10:-6], "little")
    found = {f"{name} {at}": [at, at + size - 1] for name, places in buffers(path).items() for at, size in places}
    found = {name: places for name, places in found.items() if not name.startswith("text_offset")}
    return found | {
        "magic": [*range(6)],
        "schema": [*range(16, 700, 13)],
        "metadata": [*range(data.index(b'{"run_id"'), data.index(b'{"run_id"') + 60, 7)],
        "framing": [ends[0], ends[0] + 4, ends[1] + 4],
        "padding": padding[:4],
        "end of the stream": [*range(ends[-1], ends[-1] + 8)],
        "footer": [*range(tail + 40, len(data) - 10, 29)],
        "end of the file": [*range(len(data) - 10, len(data))],
    }


def test_a_bit_that_flips_in_any_region_of_a_file_is_found(sealed, tmp_path):
    content, path = sealed.read_bytes(), tmp_path / "x.arrow"
    assert verify(sealed).ok
    missed = []
    for region, places in regions(sealed).items():
        for at in places:
            path.write_bytes(content)
            flipped(path, at, bit=at % 7)
            if verify(path).ok:
                missed.append((region, at))
    assert missed == []


@pytest.mark.parametrize("word", [b"r1", b"sample of r1"])
def test_a_row_that_names_another_run_or_sample_is_found(segment, word):
    data = bytearray(segment.read_bytes())
    column = (word * 2).ljust(len(word) * 2)
    at = data.rindex(column)
    data[at + len(word) - 1 : at + len(word)] = b"X"
    segment.write_bytes(data)
    assert verify(segment).damaged == {"r1": ["run_id" if word == b"r1" else "sample_id", "layout"]}


def test_a_checksum_is_what_the_page_of_the_format_says(segment):
    for batch in batches_of(segment):
        plain = {
            "position": batch["position"].to_numpy(),
            "phase": batch["phase"].indices.to_numpy(),
            "token_id": batch["token_id"].to_numpy(),
            A: batch[A].to_numpy_ndarray(),
            B: batch[B].to_numpy_ndarray(),
            WEIGHTS: batch[WEIGHTS].flatten().to_numpy(),
        }
        said = dict(zip(batch.schema.names[2:], batch.metadata[b"xxh3"].decode().split(","), strict=True))
        assert {name: said[name] for name in plain} == {
            name: xxh3_64_hexdigest(values.tobytes()) for name, values in plain.items()
        }


def test_points_that_leave_over_http_keep_their_checksums(segment):
    body = b"".join(as_arrow([segment], Wanted(points={B})).read())
    for (batch, metadata), message in zip(
        pa.ipc.open_stream(body).iter_batches_with_custom_metadata(), batches_of(segment), strict=True
    ):
        said = dict(zip(message.schema.names[2:], message.metadata[b"xxh3"].decode().split(","), strict=True))
        assert metadata[b"xxh3"].decode().split(",") == [said[name] for name in batch.schema.names[2:]]


def test_the_reader_on_the_page_of_the_format_reads_every_run(segment):
    page = (REPOSITORY / "docs" / "format.md").read_text()
    names = {}
    exec(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1], names)  # noqa: S102 - the page's own words
    read = list(names["read"](str(segment)))
    assert [facts["run_id"] for facts, _ in read] == ["r0", "r1"]
    for facts, table in read:
        run = load(segment, facts["run_id"])
        assert facts["sample_id"] == run.facts.sample_id
        bits = torch.from_numpy(table[B].combine_chunks().to_numpy_ndarray().copy())
        assert torch.equal(bits.view(torch.bfloat16).view(torch.uint8), run[B].view(torch.uint8))
        values = table[WEIGHTS].combine_chunks().flatten().to_numpy()
        assert values.tolist() == run[WEIGHTS].values.tolist()
