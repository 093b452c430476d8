"""Runs are read from files of any state, by their ids or places, and no file can crash the process."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
import struct
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from storing import store

from deployments.activations import read_run, runs
from deployments.activations.index.database import index_path
from deployments.activations.index.index import Index
from deployments.activations.reader import sources
from deployments.activations.reader.tables import runs_table, table
from deployments.activations.segments.segments import DamagedError, batches_of, is_sealed, whole_runs
from deployments.activations.segments.verify import verify

POINT, ROWS, WIDTH = "layers.0.output", 37, 512
RUNS = ["r0", "r1", "r2"]


@pytest.fixture
def made(make):
    return {run: make(run, {POINT: torch.randn(ROWS, WIDTH)}, created=float(i)) for i, run in enumerate(RUNS)}


@pytest.fixture
def stored(made, tmp_path):
    """A store of three runs in one file: its directory and the file."""
    [file] = store(tmp_path / "root", *made.values())
    return tmp_path / "root", file


def enlarge(file: Path, begin: int) -> None:
    """Let the header of the batch at a place say that it has a hundred thousand times the rows; Arrow believes it."""
    data, many = file.read_bytes(), 100_000
    [size] = struct.unpack_from("<I", data, begin + 4)
    header = data[begin : begin + 8 + size]
    places = [place for place in range(size) if header[place : place + 8] == struct.pack("<q", ROWS)]
    places += [place for place in range(0, size, 8) if header[place : place + 8] == struct.pack("<q", ROWS * WIDTH)]
    for others in itertools.combinations(
        places, 2
    ):  # the lengths of two buffers of a byte each, which Arrow would miss
        changed = bytearray(header)
        for place in places:
            if place not in others:
                struct.pack_into("<q", changed, place, many * struct.unpack_from("<q", header, place)[0])
        content = data[:begin] + changed + data[begin + len(header) :]
        reader = pa.ipc.open_stream(content[8:])
        with contextlib.suppress(OSError):
            reader.read_next_batch()
            if reader.read_next_batch().num_rows == ROWS * many:
                file.write_bytes(content)
                return
    raise AssertionError("Arrow does not believe it")


def test_a_run_is_loaded_with_all_that_is_known_of_it(stored, made):
    root, file = stored
    for source in (root, root / "_", root / "_" / "session", file, file.as_uri(), str(file)):
        run = read_run(source, "r1", [POINT], verify=True)
        assert run.facts == made["r1"].facts
        assert torch.equal(run[POINT], made["r1"].points[POINT])
        assert run.positions.tolist() == list(range(ROWS))
        assert run.token_ids.tolist() == list(range(100, 100 + ROWS))
        assert run.phases == ["prompt"] * (ROWS - 1) + ["generated"]
        assert [one.run_id for one in runs(source)] == RUNS
    run[POINT].zero_()  # the file stays as it is
    assert torch.equal(read_run(file, "r1")[POINT], made["r1"].points[POINT])


def test_what_is_not_one_run_or_point_is_refused_with_what_there_is(stored, tmp_path):
    root, file = stored
    with pytest.raises(ValueError, match="does not hold one run; it holds r0, r1, r2: name one as run_id"):
        read_run(root)
    with pytest.raises(ValueError, match="does not hold run 'r9'; it holds r0"):
        read_run(file, "r9")
    with pytest.raises(ValueError, match=r"Run 'r0': layers\.9\.output was not recorded; there is layers\.0"):
        read_run(file, "r0", ["layers.9.output"])
    with pytest.raises(FileNotFoundError, match="nothing at"):
        read_run(tmp_path / "none", "r0")


def test_with_its_offset_nothing_before_a_run_is_looked_at(stored, made):
    root, file = stored
    entry = Index.scanned(root).find("r2")
    data = bytearray(file.read_bytes())
    [first] = [run for run in whole_runs(file) if run.facts.run_id == "r1"]
    data[first.offset : entry.offset] = bytes(entry.offset - first.offset)
    file.write_bytes(data)
    assert torch.equal(read_run(file, "r2", offset=entry.offset)[POINT], made["r2"].points[POINT])
    assert torch.equal(read_run(file, offset=entry.offset)[POINT], made["r2"].points[POINT])


def test_a_run_that_ends_without_further_rows_is_whole(make, open_writer, tmp_path):
    writer, made = open_writer(), make("r", {POINT: torch.randn(4, 3)}, parts=2)
    writer.append(made.facts.session, "r", 0, made.batches).result()
    [file] = tmp_path.glob("*/*/*.arrow")
    assert runs(file) == []
    assert not is_sealed(file)
    writer.submit(made.facts, [], 1).result()
    [whole] = whole_runs(file)
    assert [batch.num_rows for batch in whole.batches] == [2, 2, 0]
    assert whole.damage() == []
    assert torch.equal(read_run(file, "r", verify=True)[POINT], made.points[POINT])
    assert table(file)["position"].to_pylist() == [0, 1, 2, 3]
    assert verify(file).state == "open"


def test_of_a_file_cut_anywhere_verify_says_what_load_can_still_read(make, tmp_path):
    made = [make(run, {POINT: torch.randn(4, 5)}, parts=2) for run in ("r1", "r2")]
    [path] = store(tmp_path / "root", *made)
    data, seen = path.read_bytes(), set()
    ends = [item.end for item in batches_of(path)]
    whole = [ends[i] for i in (1, 3)]
    torn = tmp_path / "torn.arrow"
    for length in (*range(0, len(data), 41), *ends, len(data)):
        torn.write_bytes(data[:length])
        found = verify(torn)
        assert found.runs == len(runs(torn)) == sum(end <= length for end in whole)
        assert found.rows == 4 * found.runs
        assert found.ok == (length == len(data) or length in whole)
        assert found.ok or found.reason
        for run in runs(torn):
            assert len(read_run(torn, run.run_id)[POINT]) == 4
        seen.add((found.state, found.runs, tuple(found.unfinished.items())))
    assert {("damaged", 0, ()), ("cut short", 0, (("r1", 2),)), ("cut short", 1, ())} < seen
    assert {("cut short", 1, (("r2", 2),)), ("open", 1, ()), ("open", 2, ()), ("whole", 2, ())} < seen


def test_a_file_that_is_cut_short_once_it_is_open_is_an_error_that_names_it(stored):
    _, file = stored
    found = list(whole_runs(file))
    os.truncate(file, 8000)  # what is mapped behind it would end the process
    with pytest.raises(DamagedError, match=f"{file}: it is cut short: it has 8000 bytes"):
        found[1].batches[0].select()
    with pytest.raises(ValueError, match="does not hold run 'r2'"):
        read_run(file, "r2")


def test_a_batch_that_says_more_than_there_is_is_an_error_that_names_its_file(stored):
    root, file = stored
    enlarge(file, Index.scanned(root).find("r1").offset)
    with pytest.raises(DamagedError, match=str(file)):
        read_run(file, "r1")
    with pytest.raises(DamagedError, match=str(file)):
        table(file, runs=["r1"])
    assert read_run(file, "r0")[POINT].shape == (ROWS, WIDTH)
    assert verify(file).state == "damaged"


def test_files_of_other_programs_hold_no_run_and_a_refusing_disk_is_said(tmp_path, stored, monkeypatch):
    _, file = stored
    other = tmp_path / "other.arrow"
    batch = pa.record_batch({"x": [1, 2]})
    with pa.OSFile(str(other), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    assert runs(other) == []
    assert verify(other).state == "damaged"
    for content in (b"", b"ARROW1\0\0", b"ARROW1\0\0" + b"\xff" * 64, b"<html>"):
        other.write_bytes(content)
        assert runs(other) == []
    pread = os.pread

    def failing(descriptor: int, size: int, at: int) -> bytes:
        if at > 5000:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pread(descriptor, size, at)

    monkeypatch.setattr(os, "pread", failing)
    with pytest.raises(OSError, match="Input/output error"):
        runs(file)
    assert verify(file).state == "unreadable"
    assert verify(tmp_path / "none").state == "unreadable"


# ---- by the id alone


def test_a_run_is_read_by_its_id_alone_wherever_its_file_is(stored, make, monkeypatch):
    root, _ = stored
    wanted = make("run-1", {POINT: torch.randn(ROWS, WIDTH)}, session_id="other", owner="ann")
    store(root, wanted)
    monkeypatch.setenv("VITRINE_ACTIVATIONS", str(root))
    assert torch.equal(read_run("run-1")[POINT], wanted.points[POINT])
    assert torch.equal(read_run("run-1", root=root)[POINT], wanted.points[POINT])
    assert table("run-1", [POINT]).num_rows == ROWS
    assert runs_table("run-1")["run_id"].to_pylist() == ["run-1"]
    monkeypatch.setattr(sources, "segments", None)  # the index says where: no file is looked for
    monkeypatch.setattr(sources, "files_of", None)
    assert torch.equal(read_run(root, "run-1")[POINT], wanted.points[POINT])
    assert torch.equal(read_run(root / "ann" / "other", "run-1")[POINT], wanted.points[POINT])
    assert set(runs_table(root, runs=["run-1", "r0"])["run_id"].to_pylist()) == {"run-1", "r0"}


@pytest.mark.parametrize("state", ["gone", "older", "damaged"])
def test_without_an_index_to_trust_the_files_are_looked_through(stored, made, state):
    root, file = stored
    path = index_path(root)
    if state == "gone":
        path.unlink()
    elif state == "older":
        with closing(Index.open(root)) as index:
            index.change("UPDATE runs SET offset = 100 WHERE run_id = 'r1'", ())
    else:
        path.write_bytes(path.read_bytes()[:4096] + b"\xee" * 65536)
    assert torch.equal(read_run("r1", root=root)[POINT], made["r1"].points[POINT])
    assert len(runs_table(root, runs=["r1"])) == 1
    shutil.move(file, file.with_name("moved.arrow"))
    assert torch.equal(read_run("r1", root=root)[POINT], made["r1"].points[POINT])


def test_a_run_that_is_nowhere_is_said_so(stored, tmp_path):
    root, _ = stored
    with pytest.raises(FileNotFoundError, match="no run 'run-2' in"):
        read_run("run-2", root=root)
    with pytest.raises(FileNotFoundError, match="no store at"):
        read_run("run-1", root=tmp_path / "none")
