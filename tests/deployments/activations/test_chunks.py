"""Runs that reach the store while they are generated."""

from __future__ import annotations

import pytest
import torch

from deployments.activations import read_run, runs
from deployments.activations.facts import SessionName, StoreError
from deployments.activations.segments.segments import batches_of

POINT = "layers.0.output"
SESSION = SessionName(None, "session")


def test_what_is_withdrawn_is_never_stored_and_what_is_stored_is_not_withdrawn(make, long, open_sender):
    sender, made = open_sender(), make("r")
    for part in range(2):
        sender.append(long, part)
    assert sender.withdraw("long", "unknown")
    overtaken = make("unknown", parts=2)
    for late in (
        lambda: sender.append(long, 2),
        lambda: sender.finish(long, 2),
        lambda: sender.append(long, 0),
        lambda: sender.append(overtaken, 0),
    ):
        with pytest.raises(StoreError):
            late()
    assert not sender.listed()
    sender.finish(made)
    assert not sender.withdraw("begun", "r")
    assert torch.equal(read_run(sender.folder, "r")[POINT], made.points[POINT])


def test_a_run_that_nothing_comes_of_is_given_up(make, long, open_sender, monkeypatch):
    sender, now = open_sender(lease_s=900), [1000.0]
    silent = make("silent", parts=3)
    monkeypatch.setattr("deployments.activations.writer.open_runs.time.monotonic", lambda: now[0])
    sender.append(long, 0)
    sender.append(silent, 0)
    now[0] += 600
    sender.append(long, 1)
    now[0] += 600
    sender.settled()
    with pytest.raises(StoreError, match="dropped: no rows of it came for 900 s"):
        sender.append(silent, 1)
    sender.finish(long, 2)
    assert sender.listed() == ["long"]


def test_parts_out_of_order_and_ids_in_use_are_refused_and_harm_nothing(make, long, open_sender):
    sender = open_sender()
    sender.append(long, 0)
    other = make("long", {POINT: torch.zeros(2, 5)})
    for wrong, reason in [
        (lambda: sender.append(long, 2), "the next part is 1"),
        (lambda: sender.append(long, 0), "another id"),
        (lambda: sender.finish(long), "another id"),
        (lambda: sender.writer.append(SESSION, "long", 1, other.batches).result(), "differ in points"),
        (lambda: sender.writer.append(SESSION, "long", 1, []), "no rows"),
        (lambda: sender.writer.append(SessionName(None, "other"), "long", 0, long.batches), "one session"),
    ]:
        with pytest.raises(StoreError, match=reason):
            wrong()
    sender.append(long, 1)
    sender.finish(long, 2)
    assert torch.equal(read_run(sender.folder)[POINT], long.points[POINT])
    with pytest.raises(StoreError, match="stored already"):
        sender.append(long, 0)


# ---- what fails


def test_a_reader_survives_that_a_run_is_cut_off_under_it(make, open_sender):
    sender = open_sender()
    sender.finish(make("first"))
    big = make("big", {POINT: torch.zeros(90_000, 4)}, parts=30)
    for part in range(29):
        sender.append(big, part)
    [path] = sender.files()
    reading = batches_of(path)
    read = [next(reading) for _ in range(6)]
    sender.abandon(big)
    with pytest.raises(ValueError, match="cut short"):
        read[-1].select()
    assert list(reading) == []
    assert runs(path) == [make("first").facts]
