"""Archiving sealed segments to a bucket, on a real server of S3's protocol."""

from __future__ import annotations

import asyncio
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load as tensors

from deployments.accounts import Account
from deployments.activations import load, runs
from deployments.activations.__main__ import main
from deployments.activations.actors.store import ActivationStore
from deployments.activations.archive import archive, uploads
from deployments.activations.archive import claim as bucket_claim
from deployments.activations.archive.archive import upload_sealed
from deployments.activations.archive.claim import InUseError
from deployments.activations.catalogue import replaying
from deployments.activations.catalogue.database import NAME
from deployments.activations.catalogue.manifest import Manifest
from deployments.activations.catalogue.replaying import has_caught_up, record
from deployments.activations.export.exports import export
from deployments.activations.facts import FileUpdate, StoreError, name_of
from deployments.activations.filters import Choice
from deployments.activations.limits import Retention
from deployments.activations.reader.sources import segments
from deployments.activations.segments.verify import verify
from deployments.activations.state.nodes import uri_of
from deployments.activations.state.state import Pins
from deployments.errors import RequestError
from tests.waiting import until

POINT, OTHER = "layers.0.output", "layers.1.output"


def same(run, made) -> bool:
    return run.facts == made.facts and all(torch.equal(run[name], values) for name, values in made.points.items())


def reads(bucket) -> list[str]:
    return [path for method, path in bucket.server.requests if method in ("GET", "HEAD") and ".arrow" in path]


def test_a_sealed_segment_is_in_the_bucket_with_the_same_bytes_and_listings_say_so(bucket, head, make):
    one = head()
    bucket.server.fails = lambda method, path: ".arrow" in path  # the bucket is away
    made = make("r", {POINT: torch.randn(5, 4), OTHER: torch.randn(5, 3).bfloat16()}, parts=2, tags={"k": "é"})
    one.store(made)
    assert one.run("r")["archived"] is False
    assert one.catalogue.session("session")["archived"] is False
    bucket.server.fails = lambda method, path: False
    until(lambda: one.is_archived("r"))
    assert one.run("r")["archived"] is True
    assert one.catalogue.sessions()[0]["archived"] is True
    [name] = bucket.objects()
    assert bucket.place.file(f"session/{name}").read() == (one.root / "session" / name).read_bytes()


def test_a_new_head_knows_all_runs_from_the_manifest_alone_and_reads_them_from_the_bucket(bucket, head, make):
    first = head()
    made = [make(f"r{i}", {POINT: torch.randn(4, 3), OTHER: torch.randn(4, 2)}, parts=2) for i in range(6)]
    first.archived(*made[:4])
    first.archived(*made[4:], make("x", session_id="other"))
    listed = first.catalogue.runs()
    first.close()
    bucket.server.requests.clear()
    second = head("new head")
    again = second.catalogue.runs()
    assert reads(bucket) == []
    assert [run["run_id"] for run in again] == [run["run_id"] for run in listed]
    assert [run["tags"] for run in again] == [run["tags"] for run in listed]
    for one in made:
        run = second.run(one.facts.run_id)
        uri = run["points"][POINT]["uri"]
        assert uri.startswith("s3://")
        at = bucket.uri("/".join(uri.rsplit("/", 2)[1:]))
        assert same(load(at, one.facts.run_id, offset=run["offset"], verify=True), one)
    with pytest.raises(StoreError, match="stored already"):
        second.store(made[0])


def test_requests_that_fail_and_connections_that_break_are_tried_again(bucket, head, make):
    one, failed, cut = head(), set(), set()

    def first_time(seen):
        def decides(method, path):
            request = method, re.sub("uploadId=[^&]*", "", path)
            return "claims" not in path and (seen.add(request) or True) if request not in seen else False

        return decides

    bucket.server.fails, bucket.server.cuts = first_time(failed), first_time(cut)
    made = [make("long", {POINT: torch.randn(14_000, 200)}, parts=2), make("short", session_id="other")]  # 11 MB
    one.archived(*made)
    assert any("partNumber" in path for _, path in failed)
    bucket.server.fails = bucket.server.cuts = lambda method, path: False
    for each in made:
        assert same(load(bucket.uri(each.facts.session_id), each.facts.run_id, verify=True), each)


def test_an_upload_that_breaks_off_in_the_middle_begins_again_and_arrives_whole(bucket, head, make):
    one, dropped = head(), []

    def drops(method, path):
        is_first = method == "PUT" and ".arrow" in path and len(dropped) < 3  # more often than a request is repeated
        return is_first and (dropped.append(path) or True)

    bucket.server.drops = drops
    made = make("r", {POINT: torch.randn(1000, 200)})  # 0.8 MB
    one.archived(made)
    assert len(dropped) == 3
    [name] = bucket.objects()
    assert bucket.place.file(f"session/{name}").read() == (one.root / "session" / name).read_bytes()
    assert same(load(bucket.uri("session"), "r", verify=True), made)


def test_an_upload_that_hangs_holds_up_nothing_else(bucket, head, make):
    one = head()
    one.archived(make("g", session_id="gone"))
    with bucket.server.holding("PUT", "/session/") as held:
        one.store(make("slow"))
        assert held.wait(60)
        one.archived(make("o", session_id="other"))
        assert one.writer.ask(lambda manager: manager.pin("other", True)).result()
        assert one.writer.delete("gone").result(60)
        until(lambda: one.archive._records() and bucket.objects("gone") == [])
        assert not one.is_archived("slow")
    until(lambda: one.is_archived("slow"))


def test_an_outage_keeps_no_run_from_being_stored_also_over_a_restart_and_all_come_afterwards(bucket, head, make):
    one = head()
    bucket.server.fails = lambda method, path: True
    one.store(make("before"))
    one.close()
    again = head()  # known to be archived: it starts without the bucket
    again.store(make("after"))
    assert bucket.server.requests
    bucket.server.fails = lambda method, path: False
    until(lambda: all(run["archived"] for run in again.catalogue.runs()))
    assert sorted(run.run_id for run in runs(bucket.uri("session"))) == ["after", "before"]


def test_runs_are_stored_and_listed_while_a_catalogue_learns_what_the_bucket_has(bucket, head, make):
    one = head()
    one.archived(make("a"))
    one.close()
    for path in one.root.glob(f"{NAME}*"):
        path.unlink()
    shutil.rmtree(one.root / "session")
    away = ["the bucket"]
    bucket.server.fails = lambda method, path: bool(away)
    again = head()
    with bucket.server.holding("GET", ".jsonl") as held:
        away.clear()
        assert held.wait(60)
        new = make("b")
        again.writer.submit(new.facts, new.batches).result(60)
        assert [run["run_id"] for run in again.catalogue.runs()] == ["b"]
    until(lambda: [run["run_id"] for run in again.catalogue.runs()] == ["a", "b"])
    again.archived(make("c"))
    assert "503" not in again.archive.trouble  # that is over


def test_a_new_directory_does_not_start_without_its_bucket(bucket, head):
    bucket.server.fails = lambda method, path: True
    with pytest.raises(OSError, match="503|SERVICE_UNAVAILABLE|SlowDown|Unable|HTTP"):
        head()


def test_a_head_killed_between_upload_and_manifest_uploads_again_and_lists_the_run_once(bucket, head, make, tmp_path):
    bucket.server.fails = lambda method, path: method == "PUT" and ".jsonl" in path and bool(bucket.objects())
    command = [sys.executable, "-m", "tests.deployments.activations.archiving_client"]
    command += [str(tmp_path / "head"), bucket.uri(""), "r"]
    root = Path(__file__).parents[3]
    with subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
        try:
            assert client.stdout.readline() == "sealed\n"
            until(lambda: ("PUT", ".jsonl") in {(method, path[-6:]) for method, path in bucket.server.requests[-20:]})
            until(bucket.objects)
        finally:
            client.kill()
    bucket.server.fails = lambda method, path: False
    again = head()  # at once: the claim is its own
    until(lambda: again.run("r")["archived"])
    assert [run["run_id"] for run in again.catalogue.runs()] == ["r"]
    assert len(bucket.objects()) == 1
    assert load(bucket.uri("session"), "r", verify=True).facts.run_id == "r"


def test_a_second_server_is_refused_with_the_firsts_host_until_that_has_ended(bucket, head, monkeypatch):
    one = head()
    with pytest.raises(InUseError, match=f"on {socket.gethostname()} .*stop it, or give this one another"):
        head("second")
    assert bucket.names(".claims") == [one.archive._claim._file.name]
    one.close()
    head("second")


def test_a_claim_that_cannot_be_read_is_one(bucket, head):
    bucket.place.below(".claims").file("another").write(b"{")
    with pytest.raises(InUseError, match="on an unknown host"):
        head()


def test_a_claim_without_heartbeats_is_stale(bucket, head, monkeypatch):
    monkeypatch.setattr(bucket_claim, "EVERY_S", 1000.0)
    head()
    monkeypatch.setattr(bucket_claim, "STALE_S", 0.0)
    head("second")


def test_a_server_that_lost_its_claim_in_a_pause_stops_archiving_and_says_so(bucket, head, make, monkeypatch, caplog):
    monkeypatch.setattr(bucket_claim, "EVERY_S", 0.02)
    one = head()
    bucket.place.below(".claims").file("another").write(b'{"host": "elsewhere", "pid": 1}')
    monkeypatch.setattr(bucket_claim, "_now", lambda: 1e12)  # it was stopped, and goes on later
    until(lambda: "NOTHING IS ARCHIVED" in caplog.text)
    assert "on elsewhere" in caplog.text
    one.store(make("r"))
    with pytest.raises(StoreError, match="elsewhere"):
        one.writer.delete("session").result()
    assert one.run("r")["archived"] is False
    assert bucket.objects() == []


def test_pins_and_owners_outlive_a_head(bucket, head, make):
    alice = Account("alice", "use")
    one = head()
    one.owners.claim("hers", alice, set)
    one.archived(make("r", session_id="hers"), make("p", session_id="pinned"), make("o", session_id="old"))
    assert one.writer.ask(lambda manager: manager.pin("pinned", True)).result()
    until(lambda: len(one.archive._records()) == 2)
    one.close()
    new = head("new head")
    assert new.owners.of("hers").owner == "alice"
    assert Pins(new.root).names() == {"pinned"}
    assert sorted(new.writer.retain(Retention(max_session_age_s=1.0)).result()) == ["hers", "old"]
    assert [one["id"] for one in new.catalogue.sessions()] == ["pinned"]
    with pytest.raises(RequestError, match="pinned"):
        new.writer.delete("pinned").result()


def test_a_pin_that_a_head_with_a_fast_clock_set_can_be_taken_away(bucket, head, make):
    one = head()
    one.archived(make("r"))
    one.archive.manifest.write([record("pin", "session", True, time.time() + 3600)])
    one.close()
    new = head("new head")
    assert new.writer.ask(lambda manager: manager.pin("session", False)).result()
    until(lambda: not new.archive._records())
    new.close()
    assert Pins(head("newest head").root).names() == set()


def test_pins_and_owners_outlive_the_states_database(bucket, head, make):
    one = head()
    one.owners.claim("hers", Account("alice", "use"), set)
    one.archived(make("r", session_id="hers"), make("p", session_id="pinned"))
    assert one.writer.ask(lambda manager: manager.pin("pinned", True)).result()
    until(lambda: len(one.archive._records()) == 2)
    one.close()
    for path in one.root.glob(".state.sqlite*"):
        path.unlink()
    bucket.server.fails = lambda method, path: True
    again = head()
    assert again.owners.of("hers").owner == "alice"
    assert again.writer.retain(Retention(max_session_age_s=1.0)).result() == ["hers"]
    again.writer.ask(lambda manager: manager.pin("pinned", False)).result()
    bucket.server.fails = lambda method, path: False
    until(lambda: not again.archive._records())
    again.close()
    assert Pins(head().root).names() == set()


def test_what_is_beyond_the_cache_leaves_the_disk_once_it_is_archived_and_is_read_from_the_bucket(bucket, head, make):
    one = head(cache_bytes=30_000)
    made = [make(f"r{i}", {POINT: torch.randn(40, 50), OTHER: torch.randn(40, 2)}) for i in range(4)]
    bucket.server.fails = lambda method, path: ".arrow" in path
    for each in made:
        one.store(each)
    files = list((one.root / "session").iterdir())
    assert len(files) == 4  # more than the cache: nothing goes before it is archived
    bucket.server.fails = lambda method, path: False
    until(lambda: len(list((one.root / "session").iterdir())) == 2)
    uris = [one.run(each.facts.run_id)["points"][POINT]["uri"].partition(":")[0] for each in made]
    assert sorted(uris) == ["file", "file", "s3", "s3"]
    one.close()
    again = head(cache_bytes=30_000)
    assert [run["run_id"] for run in again.catalogue.runs()] == ["r0", "r1", "r2", "r3"]
    for each in made:
        assert same(load(bucket.uri("session"), each.facts.run_id, verify=True), each)


def test_a_cached_file_that_could_not_be_removed_goes_once_it_can(bucket, head, make, caplog):
    one = head(cache_bytes=0)
    with bucket.server.holding("PUT", ".jsonl") as held:
        one.store(make("r"))
        assert held.wait(60)
        [path] = (one.root / "session").iterdir()
        aside = path.rename(one.root / ".aside")
        path.mkdir()
    until(lambda: "is retried" in caplog.text)
    assert one.run("r")["points"][POINT]["uri"].startswith("file:")
    path.rmdir()
    aside.rename(path)
    until(lambda: not path.exists())
    assert one.run("r")["points"][POINT]["uri"].startswith("s3:")


@pytest.fixture
def store(bucket, head, tmp_path):
    """The actor's own class on a directory that is archived; closed at the end."""
    made = list[ActivationStore]()

    def opened(**options) -> ActivationStore:
        made.append(ActivationStore(str(tmp_path / "head"), archive=bucket.uri(""), **options))
        return made[-1]

    yield opened
    bucket.server.fails = lambda method, path: False
    for one in made:
        one._writer.close()
        one._archive.close()
        one._catalogue.close()


def test_an_application_with_another_archive_than_the_running_store_is_refused(bucket, store):
    actor = store()
    asyncio.run(actor.check_archive(bucket.uri("")))
    for other in ("", bucket.uri("other")):
        with pytest.raises(StoreError, match=f"archives to {bucket.place.uri}: start with the same archive"):
            asyncio.run(actor.check_archive(other))


def test_rows_and_downloads_of_what_is_in_the_bucket_alone_are_the_same(bucket, head, store, reader_of, make, tmp_path):
    made = [make(f"r{i}", {POINT: torch.randn(40, 50)}, parts=2) for i in range(3)]
    first = head()
    first.archived(*made)
    first.close()
    shutil.rmtree(tmp_path / "head")
    actor = reader_of(store())

    async def download():
        choice = Choice("session", None, (POINT,), "safetensors")
        tag, length = await actor.find_data(choice)
        step = length // 5
        return b"".join([await actor.data_page(choice, tag, i, min(i + step, length)) for i in range(0, length, step)])

    rows = tensors(asyncio.run(actor.rows("r1", [[POINT]], "all", 1 << 20)))
    assert torch.equal(rows["0"], made[1].points[POINT])
    found = tensors(asyncio.run(download()))
    assert all(torch.equal(found[f"{one.facts.run_id}/{POINT}"], one.points[POINT]) for one in made)
    bucket.server.requests.clear()
    asyncio.run(download())
    assert reads(bucket) == []  # it was fetched once, and is on the disk


@pytest.fixture
def slow(head, store, reader_of, make, tmp_path):
    """`(reader, made, gate, asked)`: runs in the bucket alone but for `here`; fetches wait for the gate."""
    made = {name: make("r", {POINT: torch.randn(40, 50)}, session_id=name) for name in ("a", "b", "c", "here")}
    first = head()
    first.archived(*made.values())
    first.close()
    for name in "abc":
        shutil.rmtree(tmp_path / "head" / name)
    reader = reader_of(store())
    fetch, gate, asked = reader._restore, asyncio.Event(), list[list[str]]()

    async def slowly(uris):
        asked.append(uris)
        await gate.wait()
        return await fetch(uris)

    reader._restore = slowly
    return reader, made, gate, asked


async def download(reader, session):
    choice = Choice(session, None, (POINT,), "safetensors")
    tag, length = await reader.find_data(choice)
    return tensors(await reader.data_page(choice, tag, 0, length))[f"r/{POINT}"]


async def turn(fits):
    while not fits():
        await asyncio.sleep(0.01)


def test_downloads_that_wait_for_the_bucket_keep_no_other_waiting(slow):
    reader, made, gate, asked = slow

    async def steps():
        waiting = [asyncio.create_task(download(reader, name)) for name in "aabbcc"]
        await turn(lambda: len(asked) == 2 and reader._waiting.total() == len(waiting))
        assert torch.equal(await asyncio.wait_for(download(reader, "here"), 60), made["here"].points[POINT])
        assert len(asked) == 2  # sessions at a time
        gate.set()
        for name, found in zip("aabbcc", await asyncio.gather(*waiting), strict=True):
            assert torch.equal(found, made[name].points[POINT])
        assert len(asked) == 3  # each once

    asyncio.run(steps())


def test_a_fetch_that_takes_too_long_or_fails_is_said_and_the_next_request_tries_again(slow, bucket, monkeypatch):
    reader, made, gate, _ = slow

    async def steps():
        with monkeypatch.context() as patched:
            patched.setattr("deployments.activations.actors.reader._RESTORE_S", 0.1)
            with pytest.raises(RequestError, match="archived runs are being fetched; try again") as refused:
                await download(reader, "a")
        assert (refused.value.status, refused.value.code) == (503, "unavailable")
        gate.set()
        bucket.server.fails = lambda method, path: ".arrow" in path
        with pytest.raises(StoreError, match="503"):
            await download(reader, "a")
        bucket.server.fails = lambda method, path: False
        assert torch.equal(await download(reader, "a"), made["a"].points[POINT])

    asyncio.run(steps())


@pytest.mark.parametrize("lost", [False, True], ids=["catalogue-kept", "catalogue-lost"])
def test_a_deletion_is_finished_after_a_crash_and_nothing_of_it_is_listed_again(bucket, head, make, monkeypatch, lost):
    one = head()
    one.archived(make("a"), make("b", session_id="other"))
    one.store(make("late"))  # perhaps on its way to the bucket

    with monkeypatch.context() as patched:
        patched.setattr(archive.Archive, "_finish_deletions", lambda self: None)
        assert one.archive.delete("session")  # it is recorded, and then the process is killed
        one.close()
    assert bucket.objects()
    if lost:
        (one.root / NAME).unlink()
    again = head()
    assert [run["run_id"] for run in again.catalogue.runs()] == ["b"]
    assert not list((again.root / "session").glob("*.arrow"))
    until(lambda: bucket.objects() == [])
    again.archived(make("a"))  # the name is free
    again.close()
    shutil.rmtree(again.root)
    assert [run["run_id"] for run in head().catalogue.runs()] == ["a", "b"]


def test_runs_are_stored_while_the_bucket_hangs_at_a_deletion(bucket, head, make):
    one = head()
    one.archived(make("old"))
    [old] = bucket.objects()
    with bucket.server.holding("PUT", ".jsonl") as held:
        assert one.writer.delete("session").result(60)
        assert held.wait(60)
        one.store(make("new"))  # the name is free
        assert [run["run_id"] for run in one.catalogue.runs()] == ["new"]
        assert bucket.objects() == [old]  # the manifest lists it
    until(lambda: one.run("new")["archived"] and old not in bucket.objects())
    one.close()
    assert [run["run_id"] for run in head("new head").catalogue.runs()] == ["new"]


def test_what_is_deleted_while_the_bucket_is_away_stays_deleted_also_over_a_restart(bucket, head, make, monkeypatch):
    monkeypatch.setattr("deployments.activations.files.places.ATTEMPTS", 1)
    one = head()
    one.archived(make("a"), make("b", session_id="other"))
    bucket.server.fails = lambda method, path: True
    assert one.writer.delete("session").result()
    one.close()
    again = head()
    assert again.writer.delete("other").result()
    again.store(make("new"))
    assert [run["run_id"] for run in again.catalogue.runs()] == ["new"]
    again.close()
    (again.root / NAME).unlink()
    again = head()
    assert [run["run_id"] for run in again.catalogue.runs()] == ["new"]
    with pytest.raises(StoreError, match="cannot be deleted now"):  # more of it may be in the bucket
        again.writer.delete("session").result()
    bucket.server.fails = lambda method, path: False
    until(lambda: again.run("new")["archived"] and bucket.objects("other") == [] and len(bucket.objects()) == 1)
    again.close()
    assert [run["run_id"] for run in head("new head").catalogue.runs()] == ["new"]


class OtherNode:
    """Another node's disk, in this process."""

    def __init__(self, root, bucket) -> None:
        self.root, self.bucket = root, bucket

    def known(self):
        return ["node"]

    def upload(self, uri, size):
        upload_sealed(self.root / name_of(uri), size, self.bucket.place.file(name_of(uri)))


@pytest.mark.parametrize("held", [".arrow", ".jsonl"])
def test_what_is_on_its_way_to_the_bucket_while_its_session_is_deleted_does_not_come_back(
    bucket, head, make, open_sender, held
):
    made, on_it = make("r"), make("on-node")
    sender = open_sender()
    sender.finish(on_it)
    sender.writer.seal(None).result()
    [(session_id, file)] = sender.writer._catalogue.all_files()
    runs_on_it = sender.writer._catalogue.of_file(file.uri)
    one = head()
    one.archive._elsewhere = OtherNode(sender.folder.parent, bucket)
    with bucket.server.holding("PUT", held) as reached:
        one.catalogue.add(FileUpdate(session_id, runs_on_it, file._replace(uri=uri_of("node", name_of(file.uri)))))
        assert reached.wait(60)
        one.store(made)
        assert one.writer.delete("session").result(60)
        assert one.catalogue.runs() == []
    one.archived(make("other", session_id="other"))
    until(lambda: bucket.objects() == [])
    assert [run["run_id"] for run in one.catalogue.runs()] == ["other"]
    one.close()
    assert [run["run_id"] for run in head("new head").catalogue.runs()] == ["other"]


def test_uploads_of_a_node_that_is_slow_hold_up_no_other_nodes(bucket, head, make, open_sender):
    sender, one, gate = open_sender(), head(), threading.Event()
    for number in range(uploads.QUEUED + 1):
        sender.finish(make(f"r{number}", session_id=f"s{number}"))
    sender.writer.seal(None).result()
    one.archive._elsewhere = node = OtherNode(sender.folder.parent, bucket)
    node.upload = lambda uri, size: gate.wait()
    known = sender.writer._catalogue
    for session_id, file in known.all_files():
        on_node = file._replace(uri=uri_of("node", name_of(file.uri)))
        one.catalogue.add(FileUpdate(session_id, known.of_file(file.uri), on_node))
    until(lambda: len(one.archive._uploads.begun) == uploads.QUEUED)
    try:
        one.archived(make("own"))
    finally:
        gate.set()


def test_a_catalogue_that_was_made_again_learns_anew_what_the_bucket_has(bucket, head, make):
    one = head(cache_bytes=0)
    made = make("r")
    one.archived(made)
    until(lambda: not list((one.root / "session").iterdir()))
    for path in one.root.glob(f"{NAME}*"):
        with path.open("r+b") as database:
            database.write(b"\xff" * path.stat().st_size)
    one.catalogue._database.execute("PRAGMA shrink_memory")  # what it holds of the file's pages
    until(lambda: one.catalogue.remade and one.catalogue.change((), has_caught_up))
    assert one.run("r")
    assert one.writer.delete("session").result()
    until(lambda: bucket.objects() == [])


def test_files_that_are_copied_back_after_a_deletion_are_no_leftovers(bucket, head, make, tmp_path):
    one = head()
    made = make("a")
    one.archived(made)
    shutil.copytree(one.root / "session", tmp_path / "backup")
    assert one.writer.delete("session").result()
    until(lambda: bucket.objects() == [])
    one.close()
    shutil.copytree(tmp_path / "backup", one.root / "session")
    again = head()
    until(lambda: again.run("a") and again.run("a")["archived"])
    again.close()
    shutil.rmtree(again.root)
    head()
    assert same(load(bucket.uri("session"), "a", verify=True), made)


def test_a_cached_file_that_was_cut_short_never_takes_the_place_of_the_whole_one(bucket, head, make):
    one = head()
    made = [make("a", {POINT: torch.randn(40, 50)}), make("b", {POINT: torch.randn(40, 50)})]
    one.archived(*made)
    [name] = bucket.objects()
    one.close()
    path = one.root / "session" / name
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size * 3 // 4)  # behind the first run
    again = head()
    assert {run["run_id"]: run["archived"] for run in again.catalogue.runs()} == {"a": True, "b": True}
    again.archived(make("c"))
    assert all(same(load(bucket.uri("session"), each.facts.run_id, verify=True), each) for each in made)


def test_a_deleted_session_leaves_the_bucket(bucket, head, make):
    one = head()
    one.archived(make("a"), make("b", session_id="other"))
    assert one.writer.delete("session").result()
    assert not one.writer.delete("session").result()
    until(lambda: bucket.objects() == [])
    assert one.catalogue.session("session") is None
    assert len(bucket.objects("other")) == 1


def test_a_snapshot_takes_the_place_of_many_parts_also_where_a_crash_leaves_both(bucket, head, make, monkeypatch):
    monkeypatch.setattr(archive, "MANY_PARTS", 4)
    monkeypatch.setattr(archive, "MOST_PARTS", 4)
    one = head()
    kept, remove = [], Manifest.remove

    def left(self, names):
        kept.extend(names)

    monkeypatch.setattr(Manifest, "remove", left)
    made = [make(f"r{i}", {POINT: torch.randn(3, 2)}) for i in range(5)]
    for each in made:
        one.archived(each)
    one.writer.ask(lambda manager: manager.pin("session", True)).result()
    until(lambda: kept and one.archive._records())
    monkeypatch.setattr(Manifest, "remove", remove)
    one.close()
    both = head("new head")
    assert [run["run_id"] for run in both.catalogue.runs()] == [one.facts.run_id for one in made]
    until(lambda: not set(kept) & set(bucket.names(".manifest")))
    both.close()
    assert any(name.startswith("snapshot-") for name in bucket.names(".manifest"))
    snapshot = head("third head")
    assert [run["run_id"] for run in snapshot.catalogue.runs()] == [one.facts.run_id for one in made]
    assert Pins(snapshot.root).names() == {"session"}
    assert [run.run_id for run in runs(bucket.uri("session"))] == [one.facts.run_id for one in made]
    assert same(load(bucket.uri("session"), "r3", verify=True), made[3])
    listed = snapshot.catalogue.sessions()
    snapshot.close()
    monkeypatch.setattr(replaying, "LAYOUT", 0)  # the snapshot is another version's
    monkeypatch.setattr(replaying, "_PIECE", 1)
    another = head("fourth head")
    assert another.catalogue.sessions() == listed
    assert Pins(another.root).names() == {"session"}
    assert [run.run_id for run in runs(bucket.uri("session"))] == [one.facts.run_id for one in made]


def test_who_has_listed_parts_that_a_snapshot_then_replaces_reads_the_snapshot(bucket, head, make, monkeypatch):
    one = head()
    made = [make(f"r{i}") for i in range(4)]
    for each in made[:3]:
        one.archived(each)
    names = Manifest.names

    def before_a_snapshot(manifest):
        if not (listed := names(manifest)):  # of the session's folder
            return listed
        monkeypatch.setattr(Manifest, "names", names)
        monkeypatch.setattr(archive, "MANY_PARTS", 1)
        monkeypatch.setattr(archive, "MOST_PARTS", 1)
        one.archived(made[3])
        until(lambda: not set(listed) & set(bucket.names(".manifest")))
        return listed

    monkeypatch.setattr(Manifest, "names", before_a_snapshot)
    assert [run.run_id for run in runs(bucket.uri("session"))] == [each.facts.run_id for each in made]


def test_who_reads_by_the_buckets_uri_uses_the_manifest(bucket, head, make, tmp_path, capsys):
    one = head()
    points = {f"layers.{i}.output": torch.randn(200, 4) for i in range(30)} | {"big": torch.randn(200, 20_000)}
    made = [make("r", points), *(make(f"s{i}") for i in range(4))]
    one.archived(*made)
    one.archived(make("o", session_id="other"))
    assert load(bucket.uri("session"), "r").facts == made[0].facts  # the manifest is known now
    bucket.server.requests.clear()
    bucket.server.sent = 0
    names = [name for name in points if name != "big"]
    run = load(bucket.uri("session"), "r", names)
    assert all(torch.equal(run[name], points[name]) for name in names)
    assert bucket.server.sent < 1_000_000  # and not the 16 MB beside them
    assert len([1 for method, path in bucket.server.requests if method == "HEAD" and ".arrow" in path]) <= 4  # opens
    assert sorted(run.run_id for run in runs(bucket.uri("session"))) == sorted(one.facts.run_id for one in made)
    assert all(verify(file).ok for file in segments(bucket.uri("")))
    assert len(segments(bucket.uri(""), "other")) == 1
    with pytest.raises(FileNotFoundError, match="never"):
        segments(bucket.uri(""), "never")
    [written] = export(bucket.uri(""), tmp_path / "to", "pt", run=["s1"])
    assert torch.equal(torch.load(written)[0], made[2].points[POINT])
    for command, said in ((["ls"], "session"), (["ls", "session"], "s3 "), (["verify", "session"], "session")):
        assert main([command[0], "--dir", bucket.uri(""), *command[1:]]) == 0
        assert said in capsys.readouterr().out


def test_a_directory_stays_with_its_bucket(bucket, head, make, tmp_path):
    one = head()
    one.archived(make("r"))
    one.close()
    with pytest.raises(ValueError, match="is archived to s3://.*set archive=s3://"):
        ActivationStore(str(tmp_path / "head"))
