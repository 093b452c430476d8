"""A store in object storage, before a real server of S3's protocol."""

from __future__ import annotations

import asyncio
import itertools
import re
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import ray
import torch
from safetensors.torch import load as tensors

from deployments.activations import load, runs
from deployments.activations.__main__ import main
from deployments.activations.catalogue import Catalogue
from deployments.activations.compacting import Compactor
from deployments.activations.downloads import Choice
from deployments.activations.exports import export
from deployments.activations.facts import StoreError, store_name
from deployments.activations.marks import counted
from deployments.activations.object_shard import ObjectShard
from deployments.activations.objects import ObjectFile, beside, place_of
from deployments.activations.pins import Pins
from deployments.activations.reader import DamagedError, messages, path_of
from deployments.activations.recovering import recover
from deployments.activations.retention import Retention
from deployments.activations.selecting import shards
from deployments.activations.store import ActivationStore
from deployments.activations.verifying import verify
from deployments.activations.writer import Writer
from deployments.errors import RequestError

POINT, OTHER = "layers.0.output", "layers.1.output"


@pytest.fixture
def writer(bucket) -> Iterator[Writer]:
    writer = Writer(bucket.place, Catalogue())
    yield writer
    writer.close()


def name_of(uri: str) -> str:
    return uri.rpartition("/")[2]


def test_a_stored_run_is_an_object_when_the_answer_comes_and_reads_back_bit_for_bit(bucket, writer, make):
    made = make("r", {POINT: torch.randn(5, 4), OTHER: torch.randn(5, 3).bfloat16()}, parts=2, tags={"k": "é"})
    stored = writer.submit(made.facts, made.batches).result()
    uri = stored.points[POINT].uri
    assert uri == f"s3://{bucket.place.path.replace(' ', '%20')}/session/{name_of(uri)}"  # neither key nor settings
    for source in (f"session/{name_of(uri)}", "session"):
        run = load(bucket.uri(source), "r", verify=True)
        assert run.facts == made.facts
        assert all(torch.equal(run[name], values) for name, values in made.points.items())
        assert run.positions.tolist() == list(range(5))


@pytest.fixture
def at_once(writer, make, monkeypatch) -> Callable[..., list[Future]]:
    """Submits runs that share one commit, behind a run `first`; gives their futures."""
    held, entered, sync = threading.Event(), threading.Event(), ObjectShard.sync

    def slow(self):
        entered.set()
        held.wait()
        sync(self)

    def submitted(made):
        monkeypatch.setattr(ObjectShard, "sync", slow)
        first = make("first")
        before = writer.submit(first.facts, first.batches)
        assert entered.wait(60)
        futures = [writer.submit(one.facts, one.batches) for one in made]
        while not writer._queue.empty():  # what is taken in one round ends in one group
            time.sleep(0.001)
        held.set()
        before.result()
        return futures

    return submitted


def test_the_command_looks_through_object_storage_and_changes_nothing_there(bucket, writer, make, tmp_path, capsys):
    made = make("r", {POINT: torch.randn(5, 4)}, parts=2)
    writer.submit(made.facts, made.batches).result()

    def say(command: str, *args: str) -> tuple[int, str, str]:
        return main([command, "--dir", bucket.uri(""), *args]), *capsys.readouterr()

    for command in (["ls"], ["ls", "--runs"], ["show", "session"], ["verify"], ["verify", "session"]):
        status, out, err = say(*command)
        assert (status, err, "session" in out) == (0, "", True), command
    assert say("export", str(tmp_path / "to"), "--format", "pt", "--session", "session")[0] == 0
    assert torch.equal(torch.load(next((tmp_path / "to").iterdir()))[0], made.points[POINT])
    for command in (["rm", "session", "--yes"], ["gc"], ["pin", "session"], ["pull", "http://x", "session"]):
        status, _, err = say(*command)
        assert (status, "is in object storage" in err, "secret" in err) == (1, True, False), command
    assert len(bucket.objects()) == 1


def test_runs_that_come_at_once_share_an_object(bucket, at_once, make):
    made = [make(f"r{i}", session_id=session) for i in range(40) for session in ("session", "other")]
    for future in at_once(made):
        future.result()
    assert (len(bucket.objects()), len(bucket.objects("other"))) == (2, 1)
    assert len(runs(bucket.uri("session"))) == 41
    assert torch.equal(load(bucket.uri("other"), "r7")[POINT], made[15].points[POINT])


def test_a_long_run_is_an_object_of_its_own_in_many_parts(bucket, writer, make):
    long = make("long", {POINT: torch.randn(30_000, 200)}, parts=6)  # 24 MB
    for part, batch in enumerate(long.batches[:5]):
        writer.append("session", "long", part, [batch]).result()
        assert bucket.objects() == []  # nothing of it is to be seen
    short = make("short")
    writer.submit(short.facts, short.batches).result()  # waits for no other
    assert len(bucket.objects()) == 1
    writer.submit(long.facts, long.batches[5:], 5).result()
    assert len(bucket.objects()) == 2
    assert torch.equal(load(bucket.uri("session"), "long", verify=True)[POINT], long.points[POINT])
    parts = [path for method, path in bucket.server.requests if method == "PUT" and "partNumber" in path]
    assert len(parts) >= 2


def test_what_is_abandoned_leaves_no_object(bucket, writer, make):
    long = make("long", {POINT: torch.randn(8_000, 300)}, parts=2)
    writer.append("session", "long", 0, [long.batches[0]]).result()
    writer.abandon("session", "long").result()
    with pytest.raises(StoreError, match="abandoned"):
        writer.submit(long.facts, [long.batches[1]], 1).result()
    after = make("after")
    writer.submit(after.facts, after.batches).result()
    assert [run.run_id for run in runs(bucket.uri("session"))] == ["after"]
    assert len(bucket.objects()) == 1


def test_requests_that_fail_are_sent_again(bucket, writer, make):
    failed = set()

    def fails(method, path):
        first = (method, path) not in failed
        failed.add((method, path))
        return first

    bucket.server.fails = fails
    made = make("r", {POINT: torch.randn(30_000, 200)})  # parts, and the request that joins them
    writer.submit(made.facts, made.batches).result()
    assert {method for method, _ in failed} >= {"POST", "PUT"}
    assert torch.equal(load(bucket.uri("session"), "r", verify=True)[POINT], made.points[POINT])


def test_a_store_that_refuses_fails_the_run_with_the_reason_and_goes_on_afterwards(bucket, writer, make):
    bucket.server.fails = lambda method, path: method != "GET"
    made, after = make("r"), make("after")
    with pytest.raises(StoreError, match=r"store at s3://bucket.*reached and written"):
        writer.submit(made.facts, made.batches).result()
    bucket.server.fails = lambda method, path: False
    writer.submit(after.facts, after.batches).result()
    assert [run.run_id for run in runs(bucket.uri("session"))] == ["after"]


def test_runs_of_an_object_that_misses_a_part_are_not_stored(bucket, writer, at_once, make):
    parts = []

    def fails(method, path):
        parts.extend([path] if method == "PUT" and "partNumber=1&" in path else [])
        return bool(parts) and parts[-1] == path and len(parts) <= 3  # as often as a part is sent

    bucket.server.fails = fails
    made = [make("a0", {POINT: torch.randn(3, 200)}), make("a1", {POINT: torch.randn(3, 200)})]
    made += [make("b", {POINT: torch.randn(30_000, 200)}, parts=3)]  # 24 MB
    for future in at_once(made):
        with pytest.raises(StoreError, match=r"store at s3://bucket"):
            future.result()
    assert len(parts) >= 3
    for one in made:
        writer.submit(one.facts, one.batches).result()
    assert [run.run_id for run in runs(bucket.uri("session"))] == ["first", "a0", "a1", "b"]


def test_an_object_that_is_shorter_than_what_was_written_stores_no_run(bucket, writer, make, monkeypatch):
    made = make("r")
    end = ObjectShard._end

    class Short:
        """A stream that loses the end of what it takes."""

        def __init__(self, stream):
            self.tell, self.close = lambda: stream.tell() + 8, stream.close

    def loses(self):
        self._stream = Short(self._stream)
        end(self)

    with monkeypatch.context() as patched:
        patched.setattr(ObjectShard, "_end", loses)
        with pytest.raises(StoreError, match="bytes of the"):
            writer.submit(made.facts, made.batches).result()
    assert bucket.objects() == []
    writer.submit(made.facts, made.batches).result()


def test_arrows_own_errors_at_the_end_of_an_object_fail_its_runs_alone(bucket, writer, make, monkeypatch):
    made = make("r")

    def fails(self):
        raise pa.ArrowInvalid("no end")

    with monkeypatch.context() as patched:
        patched.setattr(ObjectShard, "_end", fails)
        with pytest.raises(StoreError, match="no end"):
            writer.submit(made.facts, made.batches).result()
    writer.submit(made.facts, made.batches).result()


def test_no_more_is_fetched_than_is_asked_for(bucket, writer, make):
    big = {POINT: torch.randn(1000, 8), OTHER: torch.randn(1000, 4000)}  # 32 kB and 16 MB
    made = make("r", big)
    writer.submit(made.facts, made.batches).result()
    bucket.server.sent = 0
    assert torch.equal(load(bucket.uri("session"), "r", [POINT])[POINT], big[POINT])
    assert [run.run_id for run in runs(bucket.uri("session"))] == ["r"]
    assert bucket.server.sent < 200_000


def test_who_has_listed_all_objects_holds_nothing_of_them(bucket, writer, make):
    made = make("r")
    writer.submit(made.facts, made.batches).result()
    [file] = counted(bucket.place.below("session"))

    def fetches(read):
        bucket.server.requests.clear()
        read()
        return bool(bucket.server.requests)

    assert fetches(file.reader)
    assert not fetches(file.reader)  # an object never changes
    file.close()
    assert fetches(file.reader)
    [(batch, _)] = list(file.batches())
    assert fetches(file.reader)
    assert batch["token_id"].to_pylist() == [100, 101, 102]


@pytest.mark.parametrize(
    "uri",
    [
        "foo://key:secret@bucket/p",
        "s3://key:secret@bucket/p?regoin=x",
        "s3://key:se/cret@bucket/p",
        "s3://key:se?cret@bucket/p",
        "s3://key:se#cret@bucket/p",
        "foo://key:secret@bucket:nowhere/p",
    ],
)
def test_a_uri_that_is_no_place_is_refused_without_its_keys(uri):
    with pytest.raises(ValueError, match=r"no place for a store|escape|write") as caught:
        place_of(uri)
    said = "".join(traceback.format_exception(caught.value, chain=True))
    assert "cret" not in said


def test_stores_of_one_bucket_at_two_servers_share_no_directory_and_no_name(tmp_path, monkeypatch):
    monkeypatch.setenv("VITRINE_HOME", str(tmp_path))
    uri = "s3://key:secret@bucket/p?region=us-east-1&scheme=http"
    here, there = f"{uri}&endpoint_override=127.0.0.1:1", f"{uri}&endpoint_override=127.0.0.1:2"
    assert beside(place_of(here)) != beside(place_of(there))
    assert store_name(here) != store_name(there)
    assert re.fullmatch(r"s3://bucket/p \([0-9a-f]{8}\)", store_name(here))
    assert (store_name("s3://bucket/p/"), store_name("/a/b")) == ("s3://bucket/p", "/a/b")
    others = (
        here.replace("key:secret", "other:keys"),
        here.replace("region=us-east-1&", ""),
        here.replace("/p?", "/p/?"),
    )
    assert {store_name(other) for other in others} == {store_name(here)}
    assert {beside(place_of(other)) for other in others} == {beside(place_of(here))}
    place = place_of(here)
    assert place.below("session").id == place.file("session/a.arrow").folder.id == place.id


def test_a_deleted_session_is_gone_with_its_objects_and_others_stay(bucket, writer, make):
    for session in ("session", "other"):
        made = make("r", session_id=session)
        writer.submit(made.facts, made.batches).result()
    assert writer.delete("session").result()
    assert not writer.delete("session").result()
    assert (bucket.objects(), len(bucket.objects("other"))) == ([], 1)
    assert [info.base_name for info in bucket.place.infos()] == []  # nor what said that it was to go
    made = make("again")
    writer.submit(made.facts, made.batches).result()
    assert len(bucket.objects()) == 1


def test_a_deletion_that_failed_half_way_takes_no_run_that_is_stored_afterwards(bucket, writer, make):
    for run_id in ("old", "older"):
        made = make(run_id)
        writer.submit(made.facts, made.batches).result()
    bucket.server.fails = lambda method, path: method == "DELETE"
    for _ in range(2):  # a second attempt, and then two marks
        with pytest.raises(StoreError):
            writer.delete("session").result()
    bucket.server.fails = lambda method, path: False
    after = make("after")
    writer.submit(after.facts, after.batches).result()
    recover(bucket.place)  # as the next start does
    assert [run.run_id for run in runs(bucket.uri("session"))] == ["after"]
    assert [info.base_name for info in bucket.place.infos()] == []


def test_a_session_whose_deletion_was_cut_short_is_listed_no_more_and_its_objects_go_later(
    bucket, writer, make, tmp_path, monkeypatch
):
    for run_id in ("a", "b", "c"):
        made = make(run_id)
        writer.submit(made.facts, made.batches).result()
    stays = bucket.objects()[1]
    bucket.server.fails = lambda method, path: method == "DELETE" and stays in path
    with pytest.raises(StoreError):
        writer.delete("session").result()
    bucket.server.fails = lambda method, path: False
    after = make("after")
    writer.submit(after.facts, after.batches).result()
    monkeypatch.setenv("VITRINE_HOME", str(tmp_path))
    catalogue = Catalogue.rebuild(bucket.place)
    assert [run["run_id"] for run in catalogue.runs()] == ["after"]
    Compactor(bucket.place, catalogue, threading.Lock()).tidy()
    assert [run.run_id for run in runs(bucket.uri("session"))] == ["after"]
    assert bucket.marks() == []


def test_objects_beside_the_sessions_that_say_nothing_keep_no_store_from_starting(bucket, writer, make, caplog):
    made = make("r")
    writer.submit(made.facts, made.batches).result()
    for name in (".deleted-session-1", "session/20260101T000000-00000000-000001.joined"):
        bucket.place.file(name).write(b'{"session": "session", "obj')
    recover(bucket.place)
    catalogue = Catalogue.copied(bucket.place)
    Compactor(bucket.place, catalogue, threading.Lock()).tidy(time.time() + 3700)
    assert [run["run_id"] for run in catalogue.runs()] == ["r"]
    assert [run.run_id for run in runs(bucket.uri("session"))] == ["r"]
    assert "does not say which objects go" in caplog.text


def test_what_a_killed_store_tried_a_bucket_with_goes_after_an_hour(bucket):
    compactor = Compactor(bucket.place, Catalogue(), threading.Lock())
    bucket.place.file(".new-0123").write(b"x")
    compactor.tidy()  # another store may be at it
    assert bucket.marks() == [".new-0123"]
    compactor.tidy(time.time() + 3700)
    assert bucket.marks() == []


def test_what_lies_in_objects_is_exported_and_verified_as_on_a_disk(bucket, writer, make, tmp_path):
    made = [make(f"r{i}", {POINT: torch.randn(4, 3), OTHER: torch.randn(4, 2).bfloat16()}) for i in range(3)]
    for one in made:
        writer.submit(one.facts, one.batches).result()
    files = shards(bucket.uri(""), "session")
    assert [verify(file).ok for file in files] == [True] * 3
    written = export(bucket.uri(""), tmp_path, "pt", points=[OTHER])
    assert [torch.load(file)[0].tolist() for file in written] == [one.points[OTHER].tolist() for one in made]
    [rows] = export(bucket.uri(""), tmp_path, "parquet")
    assert parquet.read_table(rows)["run_id"].to_pylist() == [one.facts.run_id for one in made for _ in range(4)]
    assert len(shards(bucket.uri(""))) == 3
    with pytest.raises(FileNotFoundError, match="never"):
        shards(bucket.uri(""), "never")


def test_damage_in_an_object_is_named(bucket, writer, make):
    made = make("r", {POINT: torch.randn(400, 30), OTHER: torch.randn(400, 3)})
    stored = writer.submit(made.facts, made.batches).result()
    file = path_of(bucket.uri(f"session/{name_of(stored.points[POINT].uri)}"))
    data = bytearray(file.fs.open_input_file(file.path).read())
    at = data.index(made.points[POINT][7].numpy().tobytes())
    data[at] ^= 1
    with file.fs.open_output_stream(file.path) as out:
        out.write(data)
    with pytest.raises(DamagedError, match=f"{POINT} are not .*{OTHER} can be read"):
        load(bucket.uri("session"), "r", verify=True)
    assert verify(path_of(bucket.uri(f"session/{file.name}"))).damaged == {"r": [POINT]}
    data[-100:] = b""
    with file.fs.open_output_stream(file.path) as out:
        out.write(data)
    cut = path_of(bucket.uri(f"session/{file.name}"))
    assert list(messages(cut)) == []
    assert verify(cut).state == "damaged"


def test_an_object_that_does_not_come_whole_is_no_shorter_one(bucket, at_once, make, monkeypatch, tmp_path):
    monkeypatch.setenv("VITRINE_HOME", str(tmp_path))
    stored = [future.result() for future in at_once([make(f"r{i}", session_id="other") for i in range(3)])]
    assert len({one.points[POINT].uri for one in stored}) == 1
    batches = ObjectFile.batches

    def breaks_off(self, first=0):
        yield from itertools.islice(batches(self, first), 2)
        raise pa.ArrowInvalid("Expected to read 128 metadata bytes, but only read 17")

    with monkeypatch.context() as patched:
        patched.setattr(ObjectFile, "batches", breaks_off)
        with pytest.raises(DamagedError, match=r"\.arrow: a batch cannot be read: Expected"):
            runs(bucket.uri("other"))
        catalogue = Catalogue.rebuild(bucket.place)
        assert [run["run_id"] for run in catalogue.session("other")["runs"]] == ["r0", "r1"]
        [file] = counted(bucket.place.below("other"))
        assert (verify(file).state, verify(file).runs) == ("damaged", 2)
    catalogue.look()
    assert [run["run_id"] for run in catalogue.session("other")["runs"]] == ["r0", "r1", "r2"]


def test_a_store_in_object_storage_serves_what_it_holds_and_knows_it_when_it_starts_again(
    bucket, make, tmp_path, monkeypatch, cluster
):
    monkeypatch.setenv("VITRINE_HOME", str(tmp_path))
    made = [make(f"r{i}", {POINT: torch.randn(5, 4)}) for i in range(3)]

    async def steps(store):
        for one in made:
            await store.write(one.facts, [ray.put(one.batches[0])])

    store = ActivationStore(bucket.uri(""))
    asyncio.run(steps(store))
    asyncio.run(store.check_room("session", 1 << 40))
    listed = asyncio.run(store.session("session"))
    assert [run["run_id"] for run in listed["runs"]] == ["r0", "r1", "r2"]
    assert "secret" not in str(listed)

    async def download():
        choice = Choice("session", None, (POINT,), "safetensors")
        tag, length = await store.find_data(choice)
        return b"".join([await store.data_page(choice, tag, i, min(i + 50, length)) for i in range(0, length, 50)])

    found = tensors(asyncio.run(download()))
    assert all(torch.equal(found[f"{one.facts.run_id}/{POINT}"], one.points[POINT]) for one in made)
    rows = tensors(asyncio.run(store.rows("r1", [[POINT]], "all", 1 << 20)))
    assert torch.equal(rows["0"], made[1].points[POINT])
    store._writer.close()
    store._catalogue.close()
    bucket.server.sent = 0
    again = ActivationStore(bucket.uri(""))
    assert asyncio.run(again.session("session")) == listed
    assert asyncio.run(again.delete("session"))
    assert asyncio.run(again.session("session")) is None
    again._writer.close()


def test_in_object_storage_quotas_and_pins_hold_too(bucket, make, monkeypatch, tmp_path):
    monkeypatch.setenv("VITRINE_HOME", str(tmp_path))
    writer = Writer(bucket.place, Catalogue())
    pinned, old, new, more = (
        make(name, {POINT: torch.randn(64, 256)}, session_id=name, created=float(created))
        for created, name in enumerate(("pinned", "old", "new", "more"))
    )
    for made in (old, pinned):
        writer.submit(made.facts, made.batches).result()
    assert writer.pin("pinned", True).result()
    writer.retain(Retention(max_store_bytes=180_000, delete_oldest=True)).result()
    writer.submit(new.facts, new.batches).result()
    writer.submit(more.facts, more.batches).result()
    assert [len(bucket.objects(name)) for name in ("pinned", "old", "new", "more")] == [1, 0, 0, 1]
    with pytest.raises(RequestError, match="unpin"):
        writer.delete("pinned").result()
    writer.close()
    again = Writer(bucket.place, Catalogue.rebuild(bucket.place))
    assert "pinned" in Pins(bucket.place)
    again.retain(Retention(max_store_bytes=150_000)).result()
    with pytest.raises(StoreError, match="store's quota"):
        again.submit(*make("late", {POINT: torch.randn(64, 256)}, session_id="late")[:2]).result()
    again.close()
