"""Owners in the store itself: no key reads, fills, changes or evicts data of another key."""

from __future__ import annotations

import pytest
from safetensors.torch import load as tensors

from deployments.accounts import OPERATOR, Account
from deployments.activations import runs
from deployments.activations.filters import EVERYTHING
from deployments.activations.index.database import index_path
from deployments.errors import RequestError

POINT = "layers.0.output"
ALICE, BOB, ADMIN = Account("alice", is_admin=False), Account("bob", is_admin=False), Account("root")


def refused(call, *args):
    with pytest.raises(RequestError) as error:
        call(*args)
    return error.value.status, error.value.code, error.value.field


def listed(store, account):
    """Ids of the sessions and runs that an account sees."""
    pages, after = [], None
    while page := store.sessions(1 if account.owner else 100, after, EVERYTHING, account):
        pages += [one["id"] for one in page]
        after = f"{pages[-1]}@{page[-1].get('owner', 'zz') or ''}"
    return pages, [run["run_id"] for run in store.runs(account=account)]


@pytest.fixture
def store(open_store):
    """Sessions of alice's, of bob's, one of each with the same name, and one that was recorded without keys."""
    store = open_store()
    for run, session, owner in (
        *(("a1", "mine", "alice"), ("a2", "same", "alice"), ("b1", "his", "bob"), ("b2", "same", "bob")),
        ("o1", "old", None),
    ):
        store.record(run, session, owner)
    return store


def test_what_is_anothers_is_as_if_it_did_not_exist(store):
    assert listed(store, ALICE) == (["mine", "same"], ["a1", "a2"])
    assert listed(store, BOB) == (["his", "same"], ["b1", "b2"])
    for account in (ADMIN, OPERATOR):
        assert listed(store, account) == (["his", "mine", "old", "same", "same"], ["a1", "a2", "b1", "b2", "o1"])
    assert refused(store.runs, EVERYTHING, 9, "a1", BOB) == refused(store.runs, EVERYTHING, 9, "none", BOB)
    assert store.runs(EVERYTHING._replace(session="mine"), account=BOB) == []
    assert store.runs(EVERYTHING._replace(owner="alice"), account=BOB) == store.runs(account=BOB)
    [file] = store.session("mine", account=ALICE)["files"]
    for hidden in ("mine", "old"):
        assert store.session(hidden, account=BOB) is None
        assert store.session(hidden, account=BOB, owner="alice") is None
        assert store.file(hidden, file["name"], account=BOB) is None
        assert not store.delete(hidden, BOB)
        assert not store.delete(hidden, BOB, "alice")
        assert not store.pin(hidden, True, BOB)
    assert store.file("his", f"../../alice/mine/{file['name']}", account=BOB) is None
    assert store.rows("a1", [[POINT]], "all", 1 << 30, BOB) is None
    assert store.pin("mine", True, ALICE)
    assert not store.delete("mine", BOB)  # and not that it is pinned
    assert refused(store.delete, "mine", ALICE)[1] == "session_pinned"
    assert tensors(store.rows("a1", [[POINT]], "all", 1 << 30, ALICE))["0"].shape == (64, 256)
    assert store.pin("mine", False, ADMIN)
    assert store.delete("mine", ALICE)
    assert listed(store, ALICE) == (["same"], ["a2"])


def test_two_keys_may_both_have_a_session_and_a_run_of_one_name_and_an_admin_says_whose(store):
    store.record("b2", "same", "alice")  # as one of bob's
    assert [run["run_id"] for run in store.session("same", account=ALICE)["runs"]] == ["a2", "b2"]
    assert [run["run_id"] for run in store.session("same", account=BOB)["runs"]] == ["b2"]
    assert refused(store.session, "same", None, None, ADMIN) == (409, "owner_missing", "owner")
    for ask in (store.session, store.delete):
        assert ask("same", account=ADMIN, owner="carol") in (None, False)
    assert store.session("same", account=ADMIN, owner="bob")["owner"] == "bob"
    assert "owner" not in store.session("old", account=OPERATOR)
    assert store.delete("same", ADMIN, "bob")
    assert [run.run_id for run in runs(store.root / "alice/same")] == ["a2", "b2"]
    assert not (store.root / "bob/same").exists()


def test_nothing_changes_hands_when_files_are_read_again_or_copied(store, open_store):
    before = [listed(store, account) for account in (ALICE, BOB, ADMIN)]
    files = {path: path.read_bytes() for path in store.root.glob("alice/mine/*.arrow")}
    store.close()
    index_path(store.root).unlink()
    again = open_store()
    assert [listed(again, account) for account in (ALICE, BOB, ADMIN)] == before
    again.close()
    [(path, data)] = files.items()
    copy = store.root / "bob/copied" / path.name
    copy.parent.mkdir()
    copy.write_bytes(data)  # an operator gives bob a copy: where a file lies decides whose it is
    copied = open_store()
    assert copied.session("copied", account=BOB)["runs"][0]["run_id"] == "a1"
    assert copied.session("copied", account=ALICE) is None
    assert [listed(copied, account) for account in (ALICE, ADMIN)][0] == before[0]
