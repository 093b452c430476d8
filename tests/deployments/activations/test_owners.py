"""Owners in the store itself: no key reads, fills, changes or evicts data of another key."""

from __future__ import annotations

import pytest

from deployments.accounts import Account
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
