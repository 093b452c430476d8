"""A store that starts repairs what a killed one left, and touches nothing else."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pytest
import torch

from deployments.activations import load, runs
from deployments.activations.catalogue.catalogue import Catalogue
from deployments.activations.catalogue.database import sealed_files
from deployments.activations.files.disk import create, directory, held
from deployments.activations.segments.segments import is_sealed, whole_runs
from deployments.activations.segments.verify import verify
from deployments.activations.writer.recovery import recover
from deployments.activations.writer.writer import Writer
from tests.waiting import until

POINT = "layers.0.output"


@pytest.fixture
def left_files(make, long, open_sender, tmp_path):
    """A session's files as a killed writer leaves them: two runs and a beginning in one, a beginning in another."""
    sender = open_sender()
    for name in ("a", "b"):
        sender.finish(make(name))
    sender.append(long, 0)
    sender.append(make("other", {POINT: torch.randn(6, 9)}, parts=3), 0)
    files = {path.name: path.read_bytes() for path in sender.files()}
    sender.writer.close()
    for path in sender.files():
        path.unlink()
    for name, data in files.items():
        (tmp_path / "session" / name).write_bytes(data)
    return sorted(tmp_path / "session" / name for name in files)


def test_a_file_is_sealed_behind_its_last_whole_run_or_removed_where_it_has_none(left_files, tmp_path):
    kept, removed = left_files
    before = {run.facts.run_id: run.first_row for run in whole_runs(kept)}
    values = {name: load(kept, name)[POINT].clone() for name in before}
    recover(tmp_path)
    assert not removed.exists()
    assert verify(kept).state == "whole"
    assert {run.facts.run_id: run.first_row for run in whole_runs(kept)} == before == {"a": 0, "b": 3}
    assert all(torch.equal(load(kept, name)[POINT], rows) for name, rows in values.items())
    assert pa.ipc.open_file(str(kept)).read_all()["run_id"].unique().to_pylist() == ["a", "b"]


def test_a_file_that_a_writer_left_beside_one_that_runs_is_sealed_too(left_files, open_sender, tmp_path, monkeypatch):
    monkeypatch.setattr("deployments.activations.writer.writer._LOOK_S", 0.02)
    kept, data = left_files[0], left_files[0].read_bytes()
    sender = open_sender()
    catalogue = sender.writer._catalogue
    kept.write_bytes(data)  # as a killed writer of another node left it
    kept.rename(other := kept.with_name("20260101T000000-00000000-000001.arrow"))
    catalogue.look()
    until(lambda: not catalogue.unsealed())
    assert verify(other).state == "whole"
    assert [run["run_id"] for run in catalogue.runs()] == ["a", "b"]


def test_a_file_that_another_arrow_framed_otherwise_is_sealed_and_no_damage(left_files, tmp_path):
    kept, _ = left_files
    data = bytearray(kept.read_bytes())
    data[data.index(torch.tensor([100, 101, 102], dtype=torch.int32).numpy().tobytes()) + 12] = 1  # padding
    kept.write_bytes(data)
    recover(tmp_path)
    assert verify(kept).state == "whole"
    assert pa.ipc.open_file(str(kept)).read_all()["run_id"].unique().to_pylist() == ["a", "b"]


def test_a_file_cut_at_any_byte_keeps_the_runs_before_it(left_files, tmp_path):
    kept, _ = left_files
    data, ends, end = kept.read_bytes(), [], 0
    for run in whole_runs(kept):
        ends.append(end := end + run.bytes)
    recover(tmp_path)
    sealed = kept.read_bytes()
    for whole in (data, sealed):
        for length in {*range(0, len(whole), 83), *ends, len(whole) - 1}:
            kept.write_bytes(whole[:length])
            recover(tmp_path)
            expected = ["a", "b"][: sum(end <= length for end in ends)]
            assert kept.exists() == bool(expected)
            if expected:
                assert [run.run_id for run in runs(kept)] == expected
                assert verify(kept).state == "whole"
                assert expected != ["a", "b"] or kept.read_bytes() == sealed


def test_what_a_writer_holds_is_left_to_it(make, long, open_sender, tmp_path):
    sender = open_sender()
    sender.finish(make("r"))
    sender.append(long, 0)
    before = {path: path.read_bytes() for path in sender.files()}
    recover(tmp_path)
    assert {path: path.read_bytes() for path in sender.files()} == before
    sender.append(long, 1)
    sender.finish(long, 2)
    assert sender.listed() == ["long", "r"]


def test_stores_that_start_beside_a_writer_take_none_of_its_files(make, open_sender, tmp_path):
    sender, over = open_sender(segment_bytes=1), threading.Event()

    def start_again_and_again():
        while not over.is_set():
            recover(tmp_path)

    with ThreadPoolExecutor(2) as pool:
        starting = [pool.submit(start_again_and_again) for _ in range(2)]
        made = [make(f"r{number:02}") for number in range(60)]
        for item in made:
            sender.finish(item)
        over.set()
        for start in starting:
            start.result()
    assert sender.listed() == [item.facts.run_id for item in made]
    assert len(sender.files()) == 60


def test_one_file_that_cannot_be_recovered_keeps_no_other_from_it(left_files, tmp_path, monkeypatch, caplog):
    kept, other = left_files
    other.rename(kept.with_name(f"20000101T000000-00000000-{1:06}.arrow"))
    bad, real = kept.with_name(f"20000101T000000-00000000-{1:06}.arrow"), os.open
    data = bad.read_bytes()

    def refuse(path, flags, *args, **named):
        if path == bad.name:
            raise PermissionError(13, "Permission denied", path)
        return real(path, flags, *args, **named)

    monkeypatch.setattr(os, "open", refuse)
    recover(tmp_path)
    assert is_sealed(kept)
    assert bad.read_bytes() == data
    assert bad.name in caplog.text


def test_links_and_files_of_other_names_are_left_alone(left_files, tmp_path, tmp_path_factory):
    kept, torn = left_files
    outside = tmp_path_factory.mktemp("outside")
    data = torn.read_bytes()
    for path in (outside / torn.name, outside / "x", kept.with_name("notes.arrow")):
        path.write_bytes(data)
    (tmp_path / "linked").symlink_to(outside)
    (tmp_path / ".deleted-linked").symlink_to(outside)
    torn.unlink()
    torn.symlink_to(outside / "x")
    os.mkfifo(kept.with_name(f"20000101T000000-00000000-{1:06}.arrow"))
    recover(tmp_path)
    assert {path.read_bytes() for path in (*outside.iterdir(), kept.with_name("notes.arrow"))} == {data}


def test_what_was_on_its_way_in_or_out_is_removed_unless_somebody_holds_it(tmp_path):
    for name in (".deleted-1", ".pull-gone", ".pull-going-on"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.arrow").touch()
    (tmp_path / ".new-1").touch()
    with held(tmp_path / ".pull-going-on"), directory(tmp_path) as top:
        file = create(".new-going-on", top)
        recover(tmp_path).join()
        os.close(file)
    assert {path.name for path in tmp_path.iterdir()} == {".pull-going-on", ".new-going-on"}
    recover(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_is_damaged_rather_than_cut_off_is_set_aside_before_the_file_is_sealed(tmp_path, make, caplog):
    writer = Writer(tmp_path, Catalogue(), idle_s=3600)
    made = [make(f"r{i}", {"p": torch.randn(50, 30)}) for i in range(6)]
    for one in made:
        writer.submit(one.facts, one.batches).result()
    [path] = (tmp_path / "session").glob("*.arrow")
    data = path.read_bytes()  # a server that ends now leaves this
    writer.close()
    ends = [run.offset + run.bytes for run in whole_runs(path)]
    for number, at in ((2, ends[1] + 8), (0, 20), (5, len(data) - 900)):  # what describes a batch; the schema; a value
        folder = tmp_path / f"copy-{number}"
        (folder / "session").mkdir(parents=True)
        broken = bytearray(data)
        broken[at : at + 4] = b"\xff\xff\xff\x7f"
        copy = folder / "session" / path.name
        copy.write_bytes(broken)
        recover(folder)
        kept = [run.run_id for run in runs(copy)] if copy.exists() else []
        assert kept == [f"r{i}" for i in range(number)]
        start = ends[number - 1] if number else 0
        [aside] = (folder / "session").glob(f"{path.name}.damaged-*")
        assert aside.read_bytes() == bytes(broken[start:])
        assert "copied to" in caplog.text
        assert [run["run_id"] for run in Catalogue.rebuild(folder).runs()] == kept
        recover(folder)
        assert len(list((folder / "session").iterdir())) == 1 + copy.exists()


def test_files_that_the_catalogue_knows_as_sealed_are_not_opened_unless_they_changed(
    make, open_writer, tmp_path, monkeypatch
):
    for number in range(3):
        writer = open_writer()
        writer.submit(*make(f"r{number}")[:2]).result()
        writer.close()
        writer._catalogue.close()
    opened, real = [], is_sealed
    monkeypatch.setattr(
        "deployments.activations.writer.recovery.is_sealed", lambda path: opened.append(path.name) or real(path)
    )
    recover(tmp_path, sealed_files(tmp_path))
    assert opened == []
    changed, *others = sorted((tmp_path / "session").iterdir())
    os.truncate(changed, changed.stat().st_size - 10)
    recover(tmp_path, sealed_files(tmp_path))
    assert set(opened) == {changed.name}
    assert all(real(path) for path in (changed, *others))
