"""The reader of a store sees each run once it is answered, and no file can crash it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import struct
from pathlib import Path

import pyarrow as pa
import pytest
import ray
import torch
from safetensors.torch import load as tensors

from deployments.activations import load
from deployments.activations.actors.reader import ActivationReader, survived
from deployments.activations.actors.store import ActivationStore
from deployments.activations.catalogue.catalogue import Catalogue
from deployments.activations.facts import StoreError
from deployments.activations.files.places import DamagedError
from deployments.activations.filters import Choice
from deployments.activations.reader import sources
from deployments.activations.reader.tables import runs_table, table
from deployments.errors import RequestError

POINT, ROWS, WIDTH = "layers.0.output", 37, 512
EVERY = 1 << 30


class Stored:
    """A store with some runs, and its reader, which counts what it asks the store's process."""

    def __init__(self, root: Path, make, runs=("r0", "r1", "r2")):
        self.root, self._make, self.waited = root, make, 0
        self.store = ActivationStore(str(root))
        self.reader = ActivationReader(str(root), wait=self._wait)
        for name in runs:
            self.write(name)

    def _wait(self):
        self.waited += 1

    def write(self, name, session="session"):
        made = self._make(name, {POINT: torch.randn(ROWS, WIDTH)}, session_id=session)
        self.store._writer.submit(made.facts, made.batches).result()
        return made

    def read(self, name, *args, **fields):
        return asyncio.run(getattr(self.reader, name)(*args, **fields))

    def listed(self, session="session"):
        found = self.read("session", session)
        return found and [run["run_id"] for run in found["runs"]]

    def rows(self, run_id):
        return self.read("rows", run_id, [[POINT]], "all", EVERY)

    def pages(self, choice, tag, length, page=1 << 16):
        return b"".join(
            self.read("data_page", choice, tag, first, min(first + page, length)) for first in range(0, length, page)
        )

    @property
    def file(self):
        [file] = (self.root / "session").glob("*.arrow")
        return file

    def close(self):
        with contextlib.suppress(StoreError):
            self.store._writer.close()
        self.store._catalogue.close()


@pytest.fixture
def stored(tmp_path, make):
    stored = Stored(tmp_path / "root", make)
    yield stored
    stored.close()


def enlarge(file: Path, begin: int) -> None:
    """Let the header of the batch at a place say that it has a hundred thousand times the rows; Arrow believes it."""
    data, many = file.read_bytes(), 100_000
    [size] = struct.unpack_from("<I", data, begin + 4)
    header = data[begin : begin + 8 + size]
    places = [place for place in range(size) if header[place : place + 8] == struct.pack("<q", ROWS)]
    places += [place for place in range(0, size, 8) if header[place : place + 8] == struct.pack("<q", ROWS * WIDTH)]
    for other in places:  # one of them is the length of a buffer, which Arrow would miss
        made = bytearray(header)
        for place in places:
            if place != other:
                struct.pack_into("<q", made, place, many * struct.unpack_from("<q", header, place)[0])
        changed = data[:begin] + made + data[begin + len(header) :]
        reader = pa.ipc.open_stream(changed[8:])
        with contextlib.suppress(OSError):
            reader.read_next_batch()
            if reader.read_next_batch().num_rows == ROWS * many:
                file.write_bytes(changed)
                return
    raise AssertionError("Arrow does not believe it")


# ---- the catalogue


def test_runs_are_found_as_soon_as_they_are_answered_without_asking_the_stores_process(stored):
    assert stored.listed() == ["r0", "r1", "r2"]
    waited = stored.waited
    for number in range(3, 20):
        stored.write(f"r{number}")
        assert stored.rows(f"r{number}")
        assert len(stored.listed()) == number + 1
    assert stored.store._writer.delete("session").result()
    assert stored.listed() is None
    assert stored.waited == waited


def test_a_store_that_starts_again_is_read_on(stored):
    before = stored.listed()
    stored.close()
    assert stored.listed() == before  # its last answers stand while it is away
    stored.store = ActivationStore(str(stored.root))
    assert stored.listed() == before
    stored.write("after")
    assert "after" in stored.listed()


def test_a_session_is_summed_up_and_listed_in_steps_that_do_not_grow_with_its_runs(stored):
    def steps() -> int:
        taken = [0]
        database = stored.store._catalogue._database
        database.set_progress_handler(lambda: taken.__setitem__(0, taken[0] + 1), 10)
        stored.store._catalogue.session("session", 2)
        stored.store._catalogue.sessions()
        stored.store._catalogue.version("session")
        database.set_progress_handler(None, 0)
        return taken[0]

    few = steps()
    futures = []
    for number in range(1000):
        made = stored._make(f"more{number}", created=2.0 + number)
        futures.append(stored.store._writer.submit(made.facts, made.batches))
    for future in futures:
        future.result()
    assert stored.store._catalogue.sessions()[0]["runs"] == 1003
    assert steps() < 2 * few


# ---- files


@pytest.mark.parametrize("format", ["arrow", "safetensors", "npz"])
def test_a_file_cut_short_under_a_download_is_an_error_that_names_it(stored, format):
    choice = Choice("session", None, None, format)
    tag, length = stored.read("find_data", choice)
    assert stored.read("data_page", choice, tag, 0, 1000)
    os.truncate(stored.file, 8000)  # what is mapped behind it would end the process
    if format == "arrow":  # of which pages are read out of the file
        with pytest.raises(StoreError, match=str(stored.file)):
            stored.pages(choice, tag, length)
    with pytest.raises(StoreError, match=str(stored.file)):
        stored.read("find_data", Choice("session", ("r1",), None, format))
    with pytest.raises(StoreError, match=str(stored.file)):
        stored.rows("r2")
    assert stored.listed() == ["r0", "r1", "r2"]


def test_a_batch_that_says_more_than_there_is_is_an_error_that_names_its_file(stored):
    enlarge(stored.file, stored.store._catalogue.find("r1").offset)
    with pytest.raises(StoreError, match=str(stored.file)):
        stored.rows("r1")
    for format in ("arrow", "safetensors", "npz", "pt"):
        with pytest.raises(StoreError, match=str(stored.file)):
            stored.read("find_data", Choice("session", ("r1",), None, format))
    with pytest.raises(DamagedError, match=str(stored.file)):
        load(stored.file, "r1")
    with pytest.raises(DamagedError, match=str(stored.file)):
        table(stored.file, runs=["r1"])
    assert tensors(stored.rows("r0"))["0"].shape == (ROWS, WIDTH)


def test_a_download_of_a_session_does_not_pass_over_a_run_that_cannot_be_read(stored):
    with stored.file.open("r+b") as file:
        file.seek(stored.store._catalogue.find("r1").offset)
        file.write(bytes(64))
    for format in ("arrow", "npz"):
        with pytest.raises(StoreError, match=f"{stored.file}: the run r1 cannot be read"):
            stored.read("find_data", Choice("session", None, None, format))


def test_a_file_that_is_gone_is_410_and_a_session_that_was_deleted_is_none(stored):
    choice = Choice("session", ("r0",))
    tag, length = stored.read("find_data", choice)
    file, aside = stored.file, stored.root / "aside"
    shutil.move(file, aside)
    for read in (
        lambda: stored.pages(choice, tag, length),
        lambda: stored.read("find_data", Choice("session")),
        lambda: stored.rows("r0"),
    ):
        with pytest.raises(RequestError, match=file.name) as refused:
            read()
        assert (refused.value.status, refused.value.code) == (410, "file_gone")
    shutil.move(aside, file)
    assert stored.store._writer.delete("session").result()
    assert stored.read("find_data", choice) is stored.rows("r0") is None
    with pytest.raises(RequestError, match="begin again"):
        stored.pages(choice, tag, length)


class Dying(ActivationReader):
    """A reader that one run ends."""

    async def rows(self, run_id, *args):
        if run_id == "deadly":
            os._exit(1)
        return run_id


@pytest.mark.long  # four starts of an actor
def test_a_reader_that_a_run_ends_says_which_and_comes_back(tmp_path, cluster):
    reader = (
        ray.remote(Dying).options(max_restarts=-1, max_task_retries=1, num_cpus=0).remote(str(tmp_path), wait=print)
    )

    async def both():
        with pytest.raises(StoreError, match="ended twice while it read run deadly"):
            await survived(reader.rows.remote("deadly"), "run deadly")
        return await survived(reader.rows.options(max_task_retries=-1).remote("r"), "run r")

    assert asyncio.run(both()) == "r"
    ray.kill(reader)


# ---- by the id alone


def test_a_run_is_read_by_its_id_alone_wherever_its_file_is(stored, monkeypatch):
    wanted = stored.write("run-1", "other")
    monkeypatch.setenv("VITRINE_ACTIVATIONS", str(stored.root))
    assert torch.equal(load("run-1")[POINT], wanted.points[POINT])
    assert torch.equal(load("run-1", root=stored.root)[POINT], wanted.points[POINT])
    assert table("run-1", [POINT]).num_rows == ROWS
    assert runs_table("run-1")["run_id"].to_pylist() == ["run-1"]
    monkeypatch.setattr(Catalogue, "copied", None)  # the database says where: no file is looked for
    monkeypatch.setattr(sources, "segments", None)
    assert runs_table(stored.root, runs=["run-1", "r0"])["run_id"].to_pylist() == ["run-1", "r0"]


def test_a_run_is_found_by_its_id_where_there_is_no_catalogue_and_one_that_is_none_is_said(stored, tmp_path):
    made = stored.write("run-1")
    stored.close()
    for name in stored.root.glob(".catalogue*"):
        name.unlink()
    assert torch.equal(load("run-1", root=stored.root)[POINT], made.points[POINT])
    with pytest.raises(FileNotFoundError, match="no run 'run-2' in"):
        load("run-2", root=stored.root)
    with pytest.raises(FileNotFoundError, match="no store at"):
        load("run-1", root=tmp_path / "none")


def test_a_run_whose_file_is_gone_is_said_so(stored):
    stored.close()
    file = stored.file
    file.unlink()
    with pytest.raises(FileNotFoundError, match=f"'r0' was in {file}, which is gone"):
        load("r0", root=stored.root)
