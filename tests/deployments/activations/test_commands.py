"""`python -m deployments.activations`: its output, and one clear line for each error."""

from __future__ import annotations

import re
from contextlib import closing

import pytest
import torch
from storing import store as stored

from deployments.activations.__main__ import main
from deployments.activations.index.database import index_path
from deployments.activations.index.index import Index
from deployments.activations.reader import pulling
from deployments.activations.segments.segments import whole_runs
from deployments.activations.writer.writer import Writer
from deployments.points.patterns import Patterns

POINT, WEIGHTS, OTHER = "layers.1.output", "layers.1.attention.weights", "norm.output"


@pytest.fixture
def made(make):
    """Two runs of the same points in two parts each, and one of another point."""
    points = lambda: {POINT: torch.randn(4, 5).bfloat16(), WEIGHTS: Patterns(torch.randn(20), 2, range(4))}  # noqa: E731
    facts = {"created": 1763700000.0, "tags": {"told": "a\tb\x1b[2J"}, "finish_reason": "stop"}
    return [
        make("r1", points(), parts=2, **facts),
        make("r2", points(), parts=2),
        make("r3", {OTHER: torch.ones(2, 3)}),
    ]


@pytest.fixture
def store(made, tmp_path):
    """A store of one session of those, whose files are sealed."""
    stored(tmp_path / "store", *made)
    return tmp_path / "store"


@pytest.fixture
def cli(store, capsys):
    """`cli("ls")`: the command's status, and what it printed and complained of."""

    def run(*args, dir=store) -> tuple[int, str, str]:
        status = main([args[0], "--dir", str(dir), *map(str, args[1:])])
        return status, *capsys.readouterr()

    return run


def test_sessions_are_listed_with_what_they_take(cli):
    status, out, _ = cli("ls")
    heads, row = out.splitlines()
    assert status == 0
    assert heads.split() == ["session", "owner", "runs", "tokens", "size", "updated", "models"]
    assert row.split()[:4] == ["session", "-", "3", "10"]
    assert re.search(r"\d+\.\d KiB  2025-11-\d\d \d\d:\d\d:\d\d[+-]\d\d:\d\d  model$", row)


def test_a_sessions_runs_are_listed_with_their_points(cli):
    status, out, _ = cli("ls", "session")
    heads, *rows = out.splitlines()
    assert status == 0
    assert heads.split() == ["run", "prompt", "tokens", "finish", "model", "sample", "created", "tags", "points"]
    assert [row.split()[0] for row in rows] == ["r2", "r3", "r1"]
    line = rf"^r1 +3 +4 +stop +model +- .*told=a\\tb\\x1b\[2J +{POINT}, {WEIGHTS}$"
    assert re.search(line, rows[2])  # a terminal obeys none


def test_sessions_are_listed_by_owner_without_an_index_and_beside_a_running_server(cli, store, make):
    index_path(store).unlink()
    with closing(Index.open(store)) as index:
        writer = Writer(store, index)
        late = make("late", {OTHER: torch.ones(2, 3)}, owner="ann")
        writer.submit(late.facts, late.batches).result()
        wanted = [["session", "-", "3"], ["session", "ann", "1"]]
        assert [line.split()[:3] for line in cli("ls")[1].splitlines()[1:]] == wanted
        writer.close()
    index_path(store).unlink()
    assert [line.split()[:3] for line in cli("ls")[1].splitlines()[1:]] == wanted
    assert not index_path(store).exists()


def test_an_export_says_what_it_wrote_and_refuses_to_overwrite(cli, tmp_path):
    assert cli("export", tmp_path / "to", "--format", "npz", "--run", "r1", "--run", "r3")[0] == 0
    assert len(list((tmp_path / "to").iterdir())) == 2
    status, out, complaint = cli("export", tmp_path / "to", "--format", "npz")
    assert (status, out) == (1, "")
    assert re.fullmatch(r"deployments\.activations: \S+activations_session_r1\.npz is there already.*\n", complaint)


@pytest.mark.parametrize(
    "args",
    [
        ("ls", "never"),
        ("ls", "../store"),
        ("export", "to", "--format", "pt", "--session", "never"),
        ("export", "to", "--format", "pt", "--points", "nothing"),
        ("verify", "never"),
        ("pull", "example.org", "session"),
        ("pull", "http://127.0.0.1:9", "other"),
        ("pull", "http://127.0.0.1:9", "session"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_status_1(cli, args, monkeypatch):
    monkeypatch.setattr(pulling, "MAX_OUTAGE_S", 0.0)
    status, out, complaint = cli(*args)
    assert (status, out) == (1, "")
    assert re.fullmatch(r"deployments\.activations: [^\n]+\n", complaint)


def test_a_store_that_is_not_there_is_named(cli, tmp_path):
    for command in (("ls",), ("ls", "s"), ("verify",), ("export", "x", "--format", "pt")):
        status, _, complaint = cli(*command, dir=tmp_path / "none")
        assert status == 1
        assert str(tmp_path / "none") in complaint


def test_whole_files_are_said_to_be_whole(cli):
    status, out, _ = cli("verify")
    assert status == 0
    assert [line.split()[3:] for line in out.splitlines()[1:]] == [["whole", "2", "8"], ["whole", "1", "2"]]


def test_damage_within_a_sealed_file_is_found_and_named(cli, store):
    path = next(path for path in store.glob("*/*/*.arrow") if len(list(whole_runs(path))) == 2)
    data = bytearray(path.read_bytes())
    start = next(whole_runs(path)).bytes  # where the second run begins
    data[start : start + 64] = b"\xff" * 64
    path.write_bytes(data)
    status, out, complaint = cli("verify", "session")
    assert status == 1
    assert "damaged" in out
    assert "batch 2 of 4 and all after it cannot be read" in out
    assert "1 of 2 files are not whole" in complaint
