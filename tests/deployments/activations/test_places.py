"""Segments in object storage are read by byte ranges, also while they are open, and never as a whole."""

from __future__ import annotations

import io
from pathlib import Path

import pyarrow as pa
import pyarrow.fs as pafs
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from safetensors.torch import load as tensors

from deployments.activations.catalogue.catalogue import Catalogue
from deployments.activations.export.downloads import Readings
from deployments.activations.export.tensor_files import WRITERS
from deployments.activations.files.places import DamagedError, Place
from deployments.activations.filters import Choice
from deployments.activations.reader.loading import load
from deployments.activations.reader.stored_rows import read_rows
from deployments.activations.writer.writer import Writer

POINT, OTHER, ROWS, WIDTH = "layers.0.output", "layers.1.output", 400, 1024


class Elsewhere(pafs.FSSpecHandler):
    """A file system of which it is known what is read."""

    def __init__(self) -> None:
        super().__init__(LocalFileSystem())
        self.reads: list[int] = []

    def open_input_file(self, path: str) -> pa.PythonFile:
        reads = self.reads

        class Counted(io.BytesIO):
            def read(self, size: int = -1) -> bytes:
                data = super().read(size)
                reads.append(len(data))
                return data

        return pa.PythonFile(Counted(Path(path).read_bytes()), mode="r")


@pytest.fixture
def stored(make, tmp_path):
    """`(catalogue, place, handler, made)`: runs in an open segment, and its store as one elsewhere."""
    catalogue = Catalogue()
    writer = Writer(tmp_path, catalogue)
    made = []
    for run in range(6):
        points = {POINT: torch.randn(ROWS, WIDTH).bfloat16(), OTHER: torch.randn(ROWS, WIDTH)}
        made.append(make(f"r{run}", points, parts=2))
        writer.submit(made[-1].facts, made[-1].batches).result()
    handler = Elsewhere()
    yield catalogue, Place(pafs.PyFileSystem(handler), str(tmp_path), tmp_path.as_uri(), restores=False), handler, made
    writer.close()


def taken(found: Readings, choice: Choice, page: int) -> list[bytes]:
    tag, length = found.find(choice)
    return [found.page(choice, tag, first, min(first + page, length)) for first in range(0, length, page)]


@pytest.mark.parametrize("format", ["arrow", *WRITERS])
def test_downloads_have_the_bytes_of_those_from_the_disk_and_read_little_more_than_they_give(stored, format):
    catalogue, place, handler, _ = stored
    choice = Choice("session", ("r1", "r4"), (OTHER,), format)
    wanted = b"".join(taken(Readings(catalogue), choice, 1 << 22))
    found = Readings(catalogue, [place])
    tag, length = found.find(choice)
    assert sum(handler.reads) < length * (0.2 if format == "arrow" else 1.3)  # the plan of a stream needs no values
    assert b"".join(taken(found, choice, 500_000)) == wanted
    handler.reads.clear()
    found.page(choice, tag, length // 3, length // 3 + 1000)
    assert sum(handler.reads) < length / 5


def test_rows_of_an_open_segment_are_read_alone(stored):
    catalogue, place, handler, made = stored
    entry = catalogue.find("r3")
    assert entry is not None
    rows = tensors(read_rows(place.file(entry.uri.removeprefix(f"{place.uri}/")), entry, [[OTHER]], "all", 1 << 22))
    assert torch.equal(rows["0"], made[3].points[OTHER])
    handler.reads.clear()
    file = place.file(entry.uri.removeprefix(f"{place.uri}/"))
    rows = tensors(read_rows(file, entry, [[POINT]], "prompt_last", 1 << 22))
    assert torch.equal(rows["0"], made[3].points[POINT][ROWS - 2 : ROWS - 1])
    assert max(handler.reads) <= 32 << 10
    run = load(file, "r3", offset=entry.offset, verify=True)
    assert all(torch.equal(run[name], values) for name, values in made[3].points.items())
    run[POINT].zero_()
    assert torch.equal(load(file, "r3", [POINT], offset=entry.offset)[POINT], made[3].points[POINT])


def test_a_segment_elsewhere_that_is_cut_short_is_an_error_that_names_it(stored):
    catalogue, place, _, _ = stored
    entry = catalogue.find("r5")
    assert entry is not None
    path = Path(entry.uri.removeprefix("file://"))
    path.write_bytes(path.read_bytes()[: entry.offset + 1000])
    with pytest.raises(DamagedError, match=path.name):
        read_rows(place.file(entry.uri.removeprefix(f"{place.uri}/")), entry, [[OTHER]], "all", 1 << 22)
    with pytest.raises(DamagedError, match=f"{path.name}: the run r5 cannot be read there"):
        Readings(catalogue, [place]).find(Choice("session", ("r5",)))
