"""Pins, owners, limits and profiles survive crashes; readers see them; those of earlier versions are taken over."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from deployments.accounts import Account
from deployments.activations.facts import StoreError
from deployments.activations.state import earlier as old_state
from deployments.activations.state.owners import Owners, Record
from deployments.activations.state.state import NAME, Pins
from deployments.client_data.profiles import StoredProfiles
from deployments.points.profiles import Profile

ALICE, BOB = Account("alice", is_admin=False), Account("bob", is_admin=False)
ZERO = {"op": "zero", "point": "layers.1.output"}


def profile(name="calm", **fields) -> dict:
    return {"name": name, "interventions": [ZERO]} | fields


@pytest.fixture
def earlier(tmp_path):
    """A store's directory as earlier versions left it."""
    kept = {
        ".pins/kept": "",
        ".pins/.new-1-half": "",
        ".owners/hers": json.dumps(Record("alice", True, True, "f" * 32, 1.5)._asdict()),
        ".owners/earliest": '{"owner": "alice"}',
        ".owners/nobodys": '{"owner": null, "shared": true, "limited": false, "fence": "", "claimed": 0.0}',
        ".owners/cut": '{"own',
        ".profiles/calm.json": json.dumps(profile(model="m", description="nobody's")),
        ".profiles/calm@alice.json": json.dumps(profile(interventions=[ZERO | {"tokens": "last"}])),
        ".profiles/late.json": json.dumps(profile("late", model="n")),
        ".profiles/other.json": json.dumps(profile("another")),
        ".profiles/broken.json": '{"name": "broken"}',
        ".profiles/.defaults.json": '{"m": "calm", "elsewhere": "late", "n": "gone"}',
    }
    for name, text in kept.items():
        path = tmp_path / "store" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    outside = tmp_path / "outside"
    outside.write_text(json.dumps(profile("linked")))
    for name in (".pins/linked", ".owners/linked", ".profiles/linked.json"):
        (tmp_path / "store" / name).symlink_to(outside)
    return tmp_path / "store"


def check_taken_over(root) -> None:
    assert Pins(root).names() == {"kept"}
    owners = Owners(root)
    assert owners.all() == {
        "hers": Record("alice", True, True, "f" * 32, 1.5),
        "earliest": Record("alice"),
        "nobodys": Record(None, True),
        "cut": Record(""),  # nobody has this name: it is admins'
    }
    assert owners.readable(BOB) == (("hers", "nobodys"), ())
    assert owners.limited("alice").keys() == {"hers"}


def fails(*_):
    raise OSError("nothing is put aside")


@pytest.mark.parametrize("dies", [False, True])
def test_files_of_earlier_versions_are_taken_over_once(earlier, dies, monkeypatch, caplog):
    assert Pins(earlier, read_only=True).names() == frozenset()  # no store has started yet
    assert not (earlier / NAME).exists()
    if dies:  # once the database has all of it, and before the files are put aside
        with monkeypatch.context() as patched:
            patched.setattr(old_state, "put_aside", fails)
            with pytest.raises(StoreError, match="put aside"):
                Owners(earlier).all()
    check_taken_over(earlier)
    assert "cut cannot be read" in caplog.text
    profiles = StoredProfiles(earlier)
    listed = [(one["name"], one["default"]) for one in profiles.list(9, None)]
    assert listed == [("calm", True), ("calm", False), ("late", False)]
    assert "other.json" in caplog.text
    assert "broken.json" in caplog.text
    assert profiles.get("calm")["description"] == "nobody's"
    assert profiles.get("calm")["created"] > 1e9
    assert profiles.get("calm", ALICE)["interventions"] == [ZERO | {"tokens": "prompt_last"}]
    assert [*profiles.defaults(None)[1]] == ["m"]

    Pins(earlier).set("kept", False)
    Owners(earlier).forget("hers")
    profiles.delete("late")
    assert Pins(earlier).names() == frozenset()
    assert "hers" not in Owners(earlier).all()
    assert [one["name"] for one in StoredProfiles(earlier).list(9, None)] == ["calm", "calm"]
    aside = sorted(path.name.partition(".taken-over-")[0] for path in earlier.iterdir() if "taken" in path.name)
    assert aside == [".owners", ".pins", ".profiles"]


def test_owners_that_are_copied_into_a_store_later_come_along_but_change_none_that_is_known(earlier):
    Owners(earlier).all()
    (earlier / ".owners").mkdir()
    for name in ("hers", "copied"):
        (earlier / ".owners" / name).write_text('{"owner": "bob"}')
    assert {name: one.owner for name, one in Owners(earlier).all().items() if one.owner != ""} == {
        "hers": "alice",
        "earliest": "alice",
        "nobodys": None,
        "copied": "bob",
    }


def test_who_reads_sees_each_change_at_once_and_writes_nothing(tmp_path):
    early = Owners(tmp_path, read_only=True)
    assert early.of("s") is None
    assert list(tmp_path.iterdir()) == []
    writing, reading, pins = Owners(tmp_path), Owners(tmp_path, read_only=True), Pins(tmp_path, read_only=True)
    fence = writing.claim("s", ALICE, set, None)
    assert early.of("s") == reading.of("s") == writing.of("s")
    assert reading.readable(ALICE) == (("s",), ())
    reading.check("s", fence)
    writing.share("s", True)
    assert reading.readable(BOB) == (("s",), ())
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
Owners(root).claim("s", Account("alice"), set, None)
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
