"""Reading a store's directory of which some runs are in its bucket alone, on a real server of S3's protocol."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing

import pytest
import torch

from deployments.activations import load, runs
from deployments.activations.__main__ import main
from deployments.activations.catalogue.buckets import ARCHIVE
from deployments.activations.catalogue.database import NAME
from deployments.activations.export.exports import export
from deployments.activations.reader.sources import segments
from deployments.activations.reader.tables import runs_table, table
from deployments.activations.reader.training import ActivationRows
from tests.waiting import until

POINT, OTHER = "layers.0.output", "layers.1.output"
RUNS = [f"run-{i}" for i in range(4)]


@pytest.fixture
def evicted(bucket, head, make):
    """`(root, made)`: a store's directory with two runs of a session on its disk, and two in its bucket alone."""
    one = head(cache_bytes=30_000)
    points = lambda: {POINT: torch.randn(40, 50), OTHER: torch.randn(40, 2)}  # noqa: E731
    made = {name: make(name, points(), created=float(i)) for i, name in enumerate(RUNS)}
    one.archived(make("other", session_id="other", created=9.0))
    for each in made.values():
        one.archived(each)
    until(lambda: len(list((one.root / "session").iterdir())) == 2)
    (one.root / ARCHIVE).write_text(f"{bucket.place.id} {bucket.uri('')}")
    return one.root, made


def indexed(source, **of) -> torch.Tensor:
    rows = ActivationRows(source, [POINT], batch_size=7, shuffle=False, **of)
    return torch.cat([batch.points[POINT].clone() for batch in rows])


@pytest.mark.parametrize("folder", ["", "session"])
def test_a_session_is_read_as_a_whole_by_every_reader(evicted, tmp_path, folder):
    root, made = evicted
    source, of = (root / folder, {} if folder else {"session": "session"})
    wanted = torch.cat([one.points[POINT] for one in made.values()])
    assert runs_table(source, **of)["run_id"].to_pylist() == RUNS
    found = table(source, [POINT], plain=True, **of)
    assert torch.equal(torch.tensor(found[POINT].to_pylist()), wanted)
    assert torch.equal(indexed(source, **of), wanted)
    assert len(export(source, tmp_path / "to", "npz", **of)) == len(RUNS)
    assert [file.local is None for file in segments(source, **of)] == [True, True, False, False]


@pytest.mark.parametrize("is_listed", [True, False])
def test_a_run_is_found_by_its_id_wherever_it_is(evicted, monkeypatch, is_listed):
    root, made = evicted
    if not is_listed:
        (root / NAME).rename(root / "aside")
    for name, one in made.items():
        for run in (load(name, root=root), load(root / "session", name), load(root, name)):
            assert run.facts == one.facts
            assert torch.equal(run[POINT], one.points[POINT])
        assert torch.equal(indexed(root, runs=[name]), one.points[POINT])
    monkeypatch.setenv("VITRINE_ACTIVATIONS", str(root))
    assert torch.equal(indexed(RUNS[0]), made[RUNS[0]].points[POINT])
    with pytest.raises(FileNotFoundError, match="no run 'run-9'"):
        load("run-9", root=root)


def test_a_session_that_has_left_the_disk_is_read_and_so_is_a_copy_of_the_directory(evicted, tmp_path, capsys):
    root, _ = evicted
    copy = tmp_path / "copy"
    shutil.copytree(root, copy)
    for store in (copy, root):  # the copy's database is none of its own
        shutil.rmtree(store / "session")
        assert [run.run_id for run in runs(store / "session")] == RUNS
        assert len(runs_table(store)) == len(RUNS) + 1
        assert main(["ls", "session", "--dir", str(store)]) == main(["verify", "--dir", str(store)]) == 0
        out = capsys.readouterr().out
        assert all(name in out for name in RUNS)
        assert out.count(" whole ") == len(RUNS) + 1


def test_a_bucket_that_refuses_is_named_with_its_reason(evicted, bucket, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("deployments.activations.files.places.ATTEMPTS", 1)
    root, _ = evicted
    bucket.server.fails = lambda method, path: True
    name = bucket.place.uri.split("/")[2]
    for read in (
        lambda: load(RUNS[0], root=root),
        lambda: table(root, session="session"),
        lambda: indexed(root),
        lambda: export(root, tmp_path, "pt"),
    ):
        with pytest.raises(OSError, match=f"{name}.*503"):
            read()
    assert load(RUNS[3], root=root).facts.run_id == RUNS[3]  # on the disk
    assert main(["export", str(tmp_path / "to"), "--format", "pt", "--dir", str(root)]) == 1
    assert name in capsys.readouterr().err


def test_a_bucket_whose_server_is_not_known_is_not_looked_for_elsewhere(evicted, bucket):
    root, _ = evicted
    (root / ARCHIVE).write_text(f"{bucket.place.id} {bucket.place}")
    with pytest.raises(OSError, match=rf"{bucket.place.uri} alone.*{root / ARCHIVE}.*endpoint_override"):
        load(RUNS[0], root=root)
    with pytest.raises(OSError, match="endpoint_override"):
        runs_table(root, session="session")


def test_copies_for_training_are_refused_where_they_do_not_fit(evicted, monkeypatch):
    root, _ = evicted
    usage = shutil.disk_usage(root)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(OSError, match="bytes of 2 files that are in a bucket do not fit .* TMPDIR"):
        indexed(root, session="session")


def test_a_run_of_another_node_that_is_archived_is_read_from_the_bucket(evicted):
    root, made = evicted
    with closing(sqlite3.connect(root / NAME)) as database, database:
        said = "UPDATE files SET uri = 'node://key/session/' || replace(uri, rtrim(uri, replace(uri, '/', '')), '')"
        assert database.execute(f"{said} WHERE session = 'session' AND uri LIKE 's3:%'").rowcount == 2
    assert torch.equal(load(RUNS[0], root=root)[POINT], made[RUNS[0]].points[POINT])
    assert runs_table(root, session="session")["run_id"].to_pylist() == RUNS
