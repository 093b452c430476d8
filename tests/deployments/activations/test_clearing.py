"""`gc`, `rm`, `pin` and `unpin`: what goes, what stays and why, and that nothing outside a store is touched."""

from __future__ import annotations

import re
import time

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deployments.activations.__main__ import main
from deployments.activations.catalogue import Catalogue
from deployments.activations.cleaning import bytes_of, seconds_of
from deployments.activations.facts import names_a_session
from deployments.activations.writer import Writer

DAY = 86400.0


@pytest.fixture
def store(make, tmp_path):
    """A store of four sessions of about 64 KiB, whose last runs were made 40, 30, 20 and 0 days ago."""
    root = tmp_path / "store"
    root.mkdir()
    writer = Writer(root, Catalogue.rebuild(root))
    for name, days in {"d40": 40, "d30": 30, "d20": 20, "d0": 0}.items():
        made = make("r", {"p": torch.randn(64, 256)}, session_id=name, created=time.time() - days * DAY)
        writer.submit(made.facts, made.batches).result()
    writer.close()
    writer._catalogue.close()
    return root


@pytest.fixture
def say(store, capsys):
    """`say("ls")`: the command's status, and what it printed and complained of."""

    def run(*args, dir=store) -> tuple[int, str, str]:
        status = main([args[0], "--dir", str(dir), *map(str, args[1:])])
        return status, *capsys.readouterr()

    return run


def sessions(store):
    return sorted(path.name for path in store.iterdir() if names_a_session(path.name))


def table(out):
    """Of each line of `gc`'s table the session and what becomes of it."""
    return [(line.split()[0], line.split("  ")[-1]) for line in out.split("\n\n")[0].splitlines()[1:]]


def test_old_sessions_are_listed_first_and_deleted_where_that_is_confirmed(say, store):
    status, out, _ = say("gc", "--older-than", "25d")
    assert status == 0
    assert table(out) == [("d40", "too old, delete"), ("d30", "too old, delete")]
    assert re.search(r"2 sessions of \d+\.\d KiB would be deleted with --yes, \d+\.\d KiB are left", out)
    assert sessions(store) == ["d0", "d20", "d30", "d40"]
    status, out, _ = say("gc", "--older-than", "25d", "--yes")
    assert (status, len(table(out))) == (0, 2)
    assert "2 sessions" in out
    assert sessions(store) == ["d0", "d20"]
    assert [line.split()[0] for line in say("ls")[1].splitlines()[1:]] == ["d0", "d20"]


def test_a_size_is_reached_by_deleting_the_oldest_but_for_pinned_ones(say, store):
    assert say("pin", "d40")[:2] == (0, "d40 is pinned\n")
    assert [line.split()[0] for line in say("ls")[1].splitlines() if " pinned " in line] == ["session", "d40"]
    status, out, _ = say("gc", "--max-bytes", "150KiB", "--older-than", "35d", "--yes")
    assert status == 0
    assert table(out) == [
        ("d40", "too old, but pinned: keep"),
        ("d30", "the oldest, delete"),
        ("d20", "the oldest, delete"),
    ]
    assert sessions(store) == ["d0", "d40"]
    status, _, complaint = say("gc", "--max-bytes", "1KiB", "--yes")
    assert (status, sessions(store)) == (1, ["d40"])
    assert re.search(r"--max-bytes 1KiB is less than the \S+ KiB of pinned sessions: unpin some", complaint)


def test_a_pinned_session_is_not_deleted_until_it_is_unpinned(say, store):
    say("pin", "d0")
    for args in (("rm", "d0"), ("rm", "d0", "--yes")):
        status, _, complaint = say(*args)
        assert status == 1
        assert "session 'd0' is pinned: unpin it" in complaint
    assert "d0" in sessions(store)
    assert say("unpin", "d0")[:2] == (0, "d0 is not pinned\n")
    assert say("rm", "d0", "--yes")[0] == 0
    assert "d0" not in sessions(store)


def test_gc_removes_what_a_killed_server_left(say, store):
    (store / ".deleted-1").mkdir()
    (store / ".deleted-1" / "x.arrow").touch()
    assert say("gc")[0] == 0
    assert (store / ".deleted-1").exists()
    assert say("gc", "--yes")[0] == 0
    assert not (store / ".deleted-1").exists()
    assert len(sessions(store)) == 4


def test_beside_a_running_server_commands_that_change_a_store_name_its_routes(say, store):
    running = Catalogue.rebuild(store)
    for args, route in {
        ("rm", "d0", "--yes"): "DELETE /v1/activations/session/d0\n",
        ("pin", "d0"): "PUT /v1/activations/session/d0/pin\n",
        ("unpin", "d0"): "DELETE /v1/activations/session/d0/pin\n",
        ("gc", "--older-than", "1d", "--yes"): "max_session_age_s",
    }.items():
        status, out, complaint = say(*args)
        assert (status, out) == (1, "")
        assert "a server runs on" in complaint
        assert route in complaint
    assert len(sessions(store)) == 4
    running.close()
    assert say("pin", "d0")[0] == 0


@pytest.mark.parametrize(("text", "said"), [("12h", 43200), ("30d", 30 * DAY), ("1.5m", 90), ("2w", 14 * DAY)])
def test_ages_are_numbers_with_a_unit(text, said):
    assert seconds_of(text, "--older-than") == said


@pytest.mark.parametrize(("text", "said"), [("7", 7), ("500GiB", 500 << 30), ("2TB", 2 * 10**12), ("1.5 KiB", 1536)])
def test_sizes_are_numbers_with_a_unit(text, said):
    assert bytes_of(text, "--max-bytes") == said


@pytest.mark.parametrize("flag", ["--older-than", "--max-bytes"])
@pytest.mark.parametrize("text", ["soon", "5 parsecs", "-1d", "-1GiB", "GiB", "1e9d", "nan"])
def test_a_bad_age_or_size_is_refused_by_its_flag(say, store, flag, text):
    status, out, complaint = say("gc", f"{flag}={text}", "--yes")
    assert (status, out) == (1, "")
    assert complaint.startswith(f"deployments.activations: {flag} ")
    assert len(sessions(store)) == 4


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    session=st.one_of(
        st.text(min_size=1, max_size=140).filter(lambda text: text[0] != "-" and not names_a_session(text)),
        st.sampled_from(["..", "../outside", "%2e%2e%2foutside", "/etc", ".pins", "linked", ".deleted-1"]),
        st.builds("../{}".format, st.text(max_size=20)),
    ),
    command=st.sampled_from([("rm", "--yes"), ("pin",), ("unpin",)]),
)
def test_no_command_leads_out_of_the_store(tmp_path, say, store, session, command):
    outside = tmp_path / "outside"
    outside.mkdir(exist_ok=True)
    (outside / "precious.arrow").touch()
    for name in ("linked", ".pins", ".deleted-link"):
        if not (store / name).is_symlink():
            (store / name).symlink_to(outside)
    before = [*sessions(store), ".deleted-link", ".pins", "linked"]
    before.remove("linked")
    status, out, complaint = say(command[0], session, *command[1:])
    assert (status, out) == (1, "")
    assert complaint
    assert say("gc", "--yes")[0] == 0
    assert [path.name for path in outside.iterdir()] == ["precious.arrow"]
    left = [path.name for path in store.iterdir() if not path.name.startswith(".catalogue.")]
    assert sorted(left) == sorted(before)
