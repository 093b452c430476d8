"""Archiving sealed files to a bucket, on a real server of S3's protocol."""

from __future__ import annotations

import os

import pytest
import torch

from deployments.activations import read_run, runs
from deployments.activations.actors.store import ActivationStore
from deployments.activations.facts import RunEnd, SessionName, StoreError, public_uri
from deployments.activations.index.database import index_path
from deployments.errors import RequestError
from tests.waiting import until

POINT = "layers.0.output"


def on_disk(store, session="_/session"):
    return sorted((store.root / session).glob("*.arrow"))


def test_a_sealed_file_is_in_the_bucket_with_the_same_bytes_and_lists_say_so_of_each_run(open_archived, bucket):
    store = open_archived()
    bucket.server.fails = lambda method, path: ".arrow" in path  # the bucket is away
    made = store.record("r", tags={"k": "é"})
    assert store.run("r")["archived"] is store.sessions()[0]["archived"] is False
    bucket.server.fails = lambda method, path: False
    store.archived("r")
    assert store.session("session")["archived"] is True
    [file] = on_disk(store)
    assert bucket.objects() == [file.name]
    with bucket.place.fs.open_input_stream(f"{bucket.place.path}/_/session/{file.name}") as data:
        assert data.read() == file.read_bytes()
    store.append(SessionName(None, "session"), "open", 0, made.batches)  # a file that is being written
    store.record("s")
    store.archived("r", "s")
    assert len(bucket.objects()) == 2
    uri = bucket.uri.replace("?", "/_/session?")
    assert torch.equal(read_run(uri, "r", verify=True)[POINT], made.points[POINT])
    assert sorted(run.run_id for run in runs(uri)) == ["r", "s"]


def test_an_outage_delays_no_run_also_over_a_restart_and_all_come_afterwards(open_archived, bucket):
    store = open_archived()
    bucket.server.fails = lambda method, path: True
    for number in range(12):
        store.record(f"r{number}", f"s{number}")
    store.close()
    again = open_archived()  # starts without the bucket
    again.record("after")
    until(lambda: len(bucket.server.requests) > 20)
    assert not any(run["archived"] for run in again.runs())
    bucket.server.fails = lambda method, path: False
    until(lambda: all(run["archived"] for run in again.runs()))
    assert len(bucket.place.list()) == 13


def test_a_bucket_that_hangs_holds_up_neither_runs_nor_other_uploads_nor_deletions(open_archived, bucket):
    store = open_archived()
    store.record("g", "gone")
    store.archived("g")
    with bucket.server.holding("PUT", "/session/") as held:
        store.record("slow")
        assert held.wait(60)
        store.record("more")
        store.record("o", "other")
        assert store.delete("gone")
        assert store.pin("other", True)
        assert [run["archived"] for run in store.runs()] == [False] * 3
    store.archived("slow", "more", "o")
    until(lambda: bucket.objects("_/gone") == [])


def test_what_is_beyond_the_cache_leaves_the_disk_once_it_is_archived_and_is_gone_with_its_uri(open_archived, bucket):
    store = open_archived(archive_cache_bytes=150_000)
    bucket.server.fails = lambda method, path: ".arrow" in path
    made = {f"r{n}": store.record(f"r{n}") for n in range(4)}
    until(lambda: not store.store._index.unsealed())
    assert len(on_disk(store)) == 4  # more than the cache: nothing goes before it is archived
    bucket.server.fails = lambda method, path: False
    until(lambda: len(on_disk(store)) == 2)
    store.close()
    store = open_archived(archive_cache_bytes=150_000)
    listed = {run["run_id"]: run for run in store.runs()}
    uris = {name: run["points"][POINT]["uri"] for name, run in listed.items()}
    assert [uris[name].partition(":")[0] for name in made] == ["s3", "s3", "file", "file"]
    for name, one in made.items():
        uri = uris[name]
        source = f"{uri}?{bucket.uri.partition('?')[2]}" if uri.startswith("s3") else uri
        assert torch.equal(read_run(source, name, verify=True)[POINT], one.points[POINT])
    assert store.file("session", listed["r3"]["file"]).length
    for ask in (
        lambda: store.file("session", listed["r0"]["file"]),
        lambda: store.rows("r0", [[POINT]], "all", 1 << 30),
    ):
        with pytest.raises(RequestError, match=uris["r0"]) as gone:
            ask()
        assert (gone.value.status, gone.value.code) == (410, "archived")
    with pytest.raises(StoreError, match="stored already"):
        store.write(made["r0"].facts, made["r0"].batches)
    assert store.delete("session")  # also what is in the bucket alone
    until(lambda: bucket.objects() == [])
    assert (store.runs(), on_disk(store)) == ([], [])


def test_what_is_deleted_while_it_is_uploaded_or_the_bucket_is_away_leaves_the_bucket(open_archived, bucket):
    store = open_archived()
    with bucket.server.holding("PUT", ".arrow") as held:
        store.record("r")
        assert held.wait(60)
        assert store.delete("session")
    store.record("a", "kept")
    store.record("b", "away")
    store.archived("a", "b")
    bucket.server.fails = lambda method, path: True
    assert store.delete("away")
    store.close()
    store = open_archived()
    assert [run["run_id"] for run in store.runs()] == ["a"]
    bucket.server.fails = lambda method, path: False
    until(lambda: not bucket.objects() and not bucket.objects("_/away"))
    assert len(bucket.objects("_/kept")) == 1


@pytest.mark.parametrize("left", ["one run", "no run", "nothing"])
def test_a_file_that_is_damaged_on_the_disk_never_takes_the_place_of_the_whole_one(open_archived, bucket, make, left):
    store = open_archived()
    made = [make(name, {POINT: torch.randn(64, 256)}) for name in "ab"]
    store.write_all([RunEnd(one.facts, one.batches) for one in made])
    store.archived("a", "b")
    [file], [name] = on_disk(store), bucket.objects()
    data = file.read_bytes()
    store.close()
    if left == "nothing":
        file.unlink()
    else:
        os.truncate(file, len(data) * 3 // (4 if left == "one run" else 9))
    store = open_archived()
    store.record("c")
    store.archived("a", "b", "c")
    assert bucket.place.size(f"_/session/{name}") == len(data)
    for one in made:
        [entry] = store.store._index.entries(runs=[one.facts.run_id])
        assert entry.uri.startswith("s3:")
        uri = f"{entry.uri}?{bucket.uri.partition('?')[2]}"
        assert torch.equal(read_run(uri, one.facts.run_id, verify=True)[POINT], one.points[POINT])


def test_files_that_come_back_are_local_again_and_a_lost_index_uploads_nothing_twice(open_archived, bucket, tmp_path):
    for step in ("new", "away", "back", "index lost"):
        if step == "away":
            (tmp_path / "root/_").rename(tmp_path / "aside")
        elif step == "back":
            (tmp_path / "aside").rename(tmp_path / "root/_")
        elif step == "index lost":
            index_path(tmp_path / "root").unlink()
            bucket.server.requests.clear()
        store = open_archived()
        if step == "new":
            store.record("a")
        store.archived("a")
        assert store.run("a")["points"][POINT]["uri"].startswith("s3:" if step == "away" else "file:")
        store.close()
    assert "PUT" not in {method for method, _ in bucket.server.requests}


def test_an_application_with_another_archive_than_the_running_store_is_refused(open_archived, bucket, tmp_path):
    store = open_archived()
    store.check_archive(bucket.uri)
    for other in ("", f"{bucket.uri}&connect_timeout=9"):
        with pytest.raises(StoreError, match=f"archives to {public_uri(bucket.uri)}.*: start with the same archive"):
            store.check_archive(other)
    with pytest.raises(ValueError, match="AWS_ACCESS_KEY_ID"):
        ActivationStore(str(tmp_path / "other"), "s3://key:s3cret@bucket/store")
    assert not (tmp_path / "other").exists()
