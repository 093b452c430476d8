"""Runs that reach the store while they are generated."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pytest
import torch

from deployments.activations import load
from deployments.activations.catalogue.catalogue import Catalogue
from deployments.activations.facts import StoreError
from deployments.activations.segments.segments import is_sealed

POINT = "layers.0.output"


def test_a_run_is_listed_once_its_last_part_is_there(long, open_sender, tmp_path):
    sender = open_sender()
    for part in range(2):
        sender.append(long, part)
        assert (sender.listed(), Catalogue.copied(tmp_path).sessions()) == ([], [])
    stored = sender.finish(long, 2)
    assert stored.points[POINT][1:] == (0, (6, 4), "float32")
    assert stored.bytes == sender.files()[0].stat().st_size
    run = load(tmp_path / "session", "long")
    assert torch.equal(run[POINT], long.points[POINT])
    assert (run.facts, run.positions.tolist()) == (long.facts, list(range(6)))


@pytest.mark.parametrize("parts", [1, 3])
def test_a_run_may_end_without_more_rows(make, open_sender, tmp_path, parts):
    sender, made = open_sender(), make("r", parts=parts)
    for part in range(parts):
        sender.append(made, part)
    sender.finish(made, parts)
    for _ in ("open", "sealed"):
        assert torch.equal(load(tmp_path / "session")[POINT], made.points[POINT])
        sender.writer.close()
    assert pa.ipc.open_file(str(sender.files()[0])).read_all().num_rows == 3


def test_short_runs_beside_a_long_one_share_another_file(make, long, open_sender):
    sender = open_sender()
    sender.finish(make("before"))
    for part in range(2):
        sender.append(long, part)
        sender.finish(make(f"beside-{part}"))
    stored = sender.finish(long, 2)
    sender.finish(make("after"))
    assert len(sender.files()) == 2
    assert stored.points[POINT].first_row == 3  # behind the run that was there before
    assert sender.listed() == ["after", "before", "beside-0", "beside-1", "long"]


def test_the_files_are_as_many_as_the_long_runs_at_one_time(make, open_sender):
    sender = open_sender()
    for turn in range(5):
        made = [make(f"r{turn}-{number}", parts=3) for number in range(4)]
        for part in range(2):
            for item in made:
                sender.append(item, part)
        sender.abandon(made.pop(turn % 4))
        for item in made:
            sender.finish(item, 2)
    assert len(sender.files()) <= 4
    assert len(sender.listed()) == 15


def test_many_senders_at_once_keep_their_runs_apart(make, open_sender, tmp_path):
    sender = open_sender(segment_bytes=20_000)
    made = [make(f"r{k:02}", {POINT: torch.randn(12, 4)}, parts=1 + k % 6) for k in range(48)]

    def send(item):
        last = len(item.batches) - 1
        for part in range(last):
            sender.append(item, part)
        if item.facts.run_id.endswith("3"):
            sender.abandon(item)
        else:
            sender.finish(item, last)

    with ThreadPoolExecutor(8) as senders:
        list(senders.map(send, made))
    kept = [item for item in made if not item.facts.run_id.endswith("3")]
    assert sender.listed() == [item.facts.run_id for item in kept]
    for item in kept:
        assert torch.equal(load(tmp_path / "session", item.facts.run_id)[POINT], item.points[POINT])


def test_a_long_run_is_never_split_and_its_full_file_is_sealed(make, open_sender):
    sender = open_sender(segment_bytes=2000)
    made = make("r", {POINT: torch.randn(400, 4)}, parts=10)
    for part in range(9):
        sender.append(made, part)
    [path] = sender.files()
    assert not is_sealed(path)
    sender.finish(made, 9)
    sender.settled()  # behind the round that sealed
    assert is_sealed(path)
    assert torch.equal(load(path)[POINT], made.points[POINT])


def test_only_segments_that_no_run_is_using_are_sealed_when_idle_or_too_many(make, long, open_sender):
    sender = open_sender(idle_s=0, open_segments=1)
    sender.append(long, 0)
    [used] = sender.files()
    sender.finish(make("short"))
    sender.settled()  # behind the round that sealed
    assert [is_sealed(path) for path in sender.files() if path != used] == [True]
    sender.append(long, 1)
    assert sender.finish(long, 2).points[POINT].uri == used.as_uri()


def test_an_abandoned_run_leaves_nothing_and_its_file_goes_on(make, long, open_sender):
    sender = open_sender()
    sender.finish(make("before"))
    [path] = sender.files()
    before = path.read_bytes()
    sender.append(long, 0)
    assert len(path.read_bytes()) > len(before)
    sender.abandon(long)
    assert path.read_bytes() == before
    with pytest.raises(StoreError, match="abandoned"):
        sender.append(long, 1)
    sender.finish(make("after"))
    sender.writer.close()
    assert pa.ipc.open_file(str(path)).read_all()["run_id"].unique().to_pylist() == ["before", "after"]
    assert sender.listed() == ["after", "before"]


def test_a_file_whose_only_run_is_abandoned_is_removed(long, open_sender):
    sender = open_sender()
    sender.append(long, 0)
    sender.abandon(long)
    assert sender.files() == []


def test_abandoning_what_is_stored_or_unknown_changes_nothing(make, open_sender):
    sender, made = open_sender(), make("r")
    sender.finish(made)
    sender.abandon(made)
    sender.abandon(make("unknown", session_id="other"))
    assert sender.listed() == ["r"]


def test_what_is_withdrawn_is_never_stored_also_of_parts_that_come_later(long, open_sender):
    sender = open_sender()
    for part in range(2):
        sender.append(long, part)
    assert sender.withdraw("long", "unknown")
    for late in (lambda: sender.append(long, 2), lambda: sender.finish(long, 2), lambda: sender.append(long, 0)):
        with pytest.raises(StoreError):
            late()
    assert not sender.listed()


def test_what_is_stored_is_not_withdrawn(make, open_sender, tmp_path):
    sender, made = open_sender(), make("r")
    sender.finish(made)
    assert not sender.withdraw("begun", "r")
    assert sender.listed() == ["r"]
    assert torch.equal(load(tmp_path / "session", "r")[POINT], made.points[POINT])


def test_a_part_that_comes_behind_the_end_of_its_run_is_refused(long, open_sender, tmp_path):
    sender = open_sender()
    sender.abandon(long)  # overtook the first part
    with pytest.raises(StoreError, match="abandoned"):
        sender.append(long, 0)
    assert all(path.name.startswith(".") for path in tmp_path.iterdir())


def test_a_run_that_nothing_comes_of_is_given_up(long, open_sender):
    sender = open_sender(lease_s=0)
    sender.append(long, 0)
    with pytest.raises(StoreError, match="dropped: no rows of it came"):
        sender.append(long, 1)
    assert sender.files() == []


def test_deleting_a_session_ends_its_open_runs(make, long, open_sender, tmp_path):
    sender = open_sender()
    sender.finish(make("stored"))
    sender.append(long, 0)
    assert sender.writer.delete("session").result()
    assert all(path.name.startswith(".") for path in tmp_path.iterdir())
    for late in (lambda: sender.append(long, 1), lambda: sender.finish(long, 1)):
        with pytest.raises(StoreError, match="session was deleted"):
            late()


def test_a_store_that_was_started_again_refuses_the_rest_of_a_run(long, open_sender):
    open_sender().append(long, 0)
    sender = open_sender()
    for late in (lambda: sender.append(long, 1), lambda: sender.finish(long, 1)):
        with pytest.raises(StoreError, match="the parts before it are gone"):
            late()
    sender.finish(long)
    assert sender.listed() == ["long"]


def test_parts_out_of_order_and_ids_in_use_are_refused_and_harm_nothing(long, open_sender, tmp_path):
    sender = open_sender()
    sender.append(long, 0)
    for wrong, reason in [
        (lambda: sender.append(long, 2), "the next part is 1"),
        (lambda: sender.append(long, 0), "another id"),
        (lambda: sender.finish(long), "another id"),
    ]:
        with pytest.raises(StoreError, match=reason):
            wrong()
    sender.append(long, 1)
    sender.finish(long, 2)
    assert torch.equal(load(tmp_path / "session")[POINT], long.points[POINT])
    with pytest.raises(StoreError, match="stored already"):
        sender.append(long, 0)


def test_parts_that_do_not_fit_together_are_refused(make, long, open_sender):
    sender = open_sender()
    sender.append(long, 0)
    other = make("long", {POINT: torch.zeros(2, 5)})
    with pytest.raises(StoreError, match="differ in points"):
        sender.writer.append("session", "long", 1, other.batches).result()
    with pytest.raises(StoreError, match="no rows"):
        sender.writer.append("session", "long", 1, [])
    with pytest.raises(StoreError, match="one session"):
        sender.writer.append("other", "long", 0, long.batches)
