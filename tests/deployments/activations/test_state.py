"""Pins, owners, limits and profiles survive crashes; readers see them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from deployments.accounts import Account
from deployments.activations.facts import StoreError
from deployments.activations.state.owners import Owners
from deployments.activations.state.state import NAME, Pins
from deployments.client_data.profiles import StoredProfiles
from deployments.points.profiles import Profile

ALICE, BOB = Account("alice", is_admin=False), Account("bob", is_admin=False)
ZERO = {"op": "zero", "point": "layers.1.output"}


def profile(name="calm", **fields) -> dict:
    return {"name": name, "interventions": [ZERO]} | fields


def test_who_reads_sees_each_change_at_once_and_writes_nothing(tmp_path):
    early = Owners(tmp_path, read_only=True)
    assert early.of("s") is None
    assert list(tmp_path.iterdir()) == []
    writing, reading, pins = Owners(tmp_path), Owners(tmp_path, read_only=True), Pins(tmp_path, read_only=True)
    fence = writing.claim("s", ALICE, set)
    assert early.of("s") == reading.of("s") == writing.of("s")
    assert reading.readable(ALICE) == ("s",)
    reading.check("s", fence)
    writing.share("s", True)
    assert reading.readable(BOB) == ("s",)
    Pins(tmp_path).set("s", True)
    assert "s" in pins
    writing.forget("s")
    assert reading.of("s") is None
    with pytest.raises(StoreError, match="readonly"):
        reading.share("s", True)


def test_what_was_answered_is_there_after_a_kill(tmp_path):
    """Another process pins, claims and is killed as soon as it has said so; a reader sees it meanwhile."""
    script = f"""
from pathlib import Path
from deployments.accounts import Account
from deployments.activations.state.owners import Owners
from deployments.activations.state.state import Pins
root = Path({str(tmp_path)!r})
Pins(root).set("s", True)
Owners(root).claim("s", Account("alice"), set)
print("done", flush=True)
input()
"""
    folder = Path(__file__).parents[3]
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=folder
    ) as process:
        try:
            assert process.stdout.readline() == "done\n"
            assert Owners(tmp_path, read_only=True).of("s").owner == "alice"
        finally:
            process.kill()
    assert Pins(tmp_path).names() == {"s"}
    assert Owners(tmp_path).of("s").owner == "alice"


def test_a_full_disk_refuses_with_what_to_do_and_changes_nothing(tmp_path):
    profiles = StoredProfiles(tmp_path)
    profiles.put(Profile.model_validate(profile(description="first")))
    with profiles.change() as database:
        [[pages]] = database.execute("PRAGMA page_count")
    profiles._database.execute(f"PRAGMA max_page_count = {pages}")
    large = profile(interventions=[ZERO] * 200)
    with pytest.raises(StoreError, match="is full.*free space on the disk"):
        profiles.put(Profile.model_validate(large))
    assert profiles.get("calm")["description"] == "first"
    assert StoredProfiles(tmp_path).get("calm")["interventions"] == [ZERO]


def test_a_database_that_is_there_is_opened_without_a_write_since_the_disk_may_be_full(tmp_path):
    pins, log = Pins(tmp_path), tmp_path / f"{NAME}-wal"
    pins.set("s", True)
    before = log.read_bytes()
    assert Pins(tmp_path).names() == {"s"}
    assert log.read_bytes() == before


def test_while_the_directory_is_away_it_is_read_and_nothing_is_taken_for_kept(tmp_path):
    root = tmp_path / "store"
    root.mkdir()
    pins, reading = Pins(root), Pins(root, read_only=True)
    pins.set("s", True)
    assert reading.names() == {"s"}
    root.rename(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="put the directory back"):
        pins.set("t", True)
    assert reading.names() == pins.names() == {"s"}
    (tmp_path / "elsewhere").rename(root)
    pins.set("u", True)
    assert reading.names() == Pins(root).names() == {"s", "u"}


def test_a_database_that_is_damaged_or_a_link_is_an_error_that_names_it(tmp_path):
    (tmp_path / NAME).write_bytes(b"no database" * 1000)
    with pytest.raises(StoreError, match=NAME) as refused:
        Pins(tmp_path).names()
    assert "is damaged: put a copy of it back" in str(refused.value)
    (tmp_path / NAME).unlink()
    (tmp_path / NAME).symlink_to(tmp_path / "outside")
    with pytest.raises(StoreError, match="a link is not followed"):
        Pins(tmp_path).set("s", True)
    assert not (tmp_path / "outside").exists()
