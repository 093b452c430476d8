"""Reading stores, owners' and sessions' directories, on the disk and in a bucket of a real server of S3's protocol."""

from __future__ import annotations

import shutil
import sys
from contextlib import closing

import pytest
import torch
from storing import store

from deployments.activations import archive, read_run, runs
from deployments.activations.__main__ import main
from deployments.activations.exports import export
from deployments.activations.index.index import Index
from deployments.activations.reader.sources import segments
from deployments.activations.reader.tables import runs_table, table
from deployments.activations.reader.training import ActivationRows

POINT = "layers.0.output"
NAMES = [f"run-{i}" for i in range(4)]


@pytest.fixture
def made(make):
    """By run: four runs of the sessions `s` of two owners and of nobody, and `t`."""
    of = [("s", "ann"), ("s", "bob"), ("s", None), ("t", "ann")]
    return {
        name: make(name, {POINT: torch.randn(40, 5)}, session_id=session, owner=owner, created=float(i))
        for i, (name, (session, owner)) in enumerate(zip(NAMES, of, strict=True))
    }


@pytest.fixture
def root(made, tmp_path):
    store(tmp_path / "root", *made.values())
    return tmp_path / "root"


@pytest.fixture
def uploaded(root, bucket):
    """`uri(path)`: of what lies below the store in a bucket."""
    for path in root.glob("*/*/*.arrow"):
        bucket.place.put(str(path.relative_to(root)), path)
    base, _, settings = bucket.uri.partition("?")
    return lambda path="": f"{base}/{path}".rstrip("/") + f"?{settings}"


def found(source, session=None) -> list[str]:
    return sorted(runs_table(source, session=session)["run_id"].to_pylist())


def indexed(source, **of) -> torch.Tensor:
    rows = ActivationRows(source, [POINT], batch_size=7, shuffle=False, **of)
    return torch.cat([batch.points[POINT] for batch in rows])


def test_a_store_an_owner_and_a_session_are_sources(root):
    assert found(root) == NAMES
    assert found(root, "s") == found(root.as_uri(), "s") == NAMES[:3]
    assert found(root / "ann") == ["run-0", "run-3"]
    assert found(root / "ann", "t") == found(root / "ann" / "t") == found(root / "ann" / "t", "t") == ["run-3"]
    assert found(root / "_") == ["run-2"]
    with pytest.raises(FileNotFoundError, match="no session 'never' in"):
        found(root, "never")
    with pytest.raises(ValueError, match="session_id"):
        found(root, "../root")


def test_links_and_hidden_directories_are_not_followed(root, tmp_path):
    outer = tmp_path / "outer"
    (outer / "ann").mkdir(parents=True)
    (outer / "ann" / "link").symlink_to(root / "ann" / "s")
    shutil.copytree(root / "ann" / "s", outer / "ann" / ".deleted-s")
    shutil.copytree(root / "ann", outer / "deep" / "er" / "ann")
    assert segments(outer) == []


@pytest.mark.parametrize(("path", "runs"), [("", NAMES), ("ann", ["run-0", "run-3"]), ("bob/s", ["run-1"])])
def test_a_bucket_is_read_like_a_directory(uploaded, made, path, runs, tmp_path, capsys):
    source = uploaded(path)
    assert found(source) == runs
    wanted = {name: made[name].points[POINT] for name in runs}
    for name, value in wanted.items():
        assert torch.equal(read_run(source, name, verify=True)[POINT], value)
        assert torch.equal(read_run(name, root=source)[POINT], value)
        assert torch.equal(indexed(source, runs=[name]), value)
    assert len(table(source, [POINT])) == 40 * len(runs)
    assert len(export(source, tmp_path / "to", "npz")) == len(runs)
    assert main(["verify", "--dir", source]) == 0
    assert capsys.readouterr().out.count(" whole ") == len(runs)
    assert main(["ls", "--dir", source]) == 1
    assert "is in object storage: ask a server" in capsys.readouterr().err


def test_one_file_of_a_bucket_is_a_source_and_is_fetched_once(uploaded, root, bucket):
    [file] = (root / "ann" / "t").iterdir()
    source = uploaded(f"ann/t/{file.name}")
    assert [run.run_id for run in runs(source)] == ["run-3"]
    fetched = [one for one in bucket.server.requests if one[0] == "GET" and one[1].endswith(".arrow")]
    assert read_run(source).facts.run_id == "run-3"
    assert [one for one in bucket.server.requests if one[0] == "GET" and one[1].endswith(".arrow")] == fetched
    with pytest.raises(FileNotFoundError, match="nothing at"):
        runs(uploaded("ann/t/none.arrow"))


def test_files_of_a_bucket_are_fetched_one_by_one_until_a_run_is_found(uploaded, bucket):
    assert read_run(uploaded(), "run-2").facts.owner is None  # of `_`, the first directory
    assert len({one for one in bucket.server.requests if one[0] == "GET" and one[1].endswith(".arrow")}) == 1


def test_a_bucket_that_refuses_or_a_full_disk_is_said(uploaded, bucket, monkeypatch):
    monkeypatch.setattr(archive, "ATTEMPTS", 1)
    bucket.server.fails = lambda method, path: method == "GET" and path.endswith(".arrow")
    with pytest.raises(OSError, match="AWS Error"):
        table(uploaded())
    bucket.server.fails = lambda method, path: False
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(OSError, match="bytes of 4 files that are in a bucket do not fit .* TMPDIR"):
        indexed(uploaded())


def test_what_has_left_the_disk_is_read_from_the_bucket(root, uploaded, made, bucket):
    with closing(Index.open(root, bucket.uri)) as index:
        index.change("UPDATE files SET archived = 1", ())
        index.change("UPDATE files SET local = 0 WHERE owner = 'bob'", ())
    shutil.rmtree(root / "bob")
    assert torch.equal(read_run("run-1", root=root)[POINT], made["run-1"].points[POINT])
    assert found(root, "s") == NAMES[:3]
    assert torch.equal(indexed(root, runs=["run-1"]), made["run-1"].points[POINT])


def test_fsspec_reads_what_arrow_has_no_file_system_for(root, made):
    import fsspec

    memory = fsspec.filesystem("memory")
    at = archive.bucket("memory://store")
    for path in root.glob("*/*/*.arrow"):
        at.put(str(path.relative_to(root)), path)
    try:
        assert found("memory://store") == NAMES
        assert torch.equal(read_run("memory://store/ann", "run-3")[POINT], made["run-3"].points[POINT])
        name, size = next(iter(at.list("bob/s").items()))
        assert at.size(name) == size
        at.remove(name)
        at.remove(name)
        assert at.size(name) is None
    finally:
        memory.rm("/store", recursive=True)


def test_what_is_missing_for_a_bucket_is_named(monkeypatch):
    with pytest.raises(ValueError, match="nothing://x cannot be a store"):
        archive.bucket("nothing://x")
    with pytest.raises(ValueError, match="a URI must not contain keys"):
        archive.bucket("s3://id:key@bucket/x")
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(ValueError, match="install its package"):
        archive.bucket("az://container/x")
