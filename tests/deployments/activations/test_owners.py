"""Owners in the store itself: no key reads, fills, changes or evicts data of another key."""

from __future__ import annotations

import asyncio
from itertools import count

import pytest
import torch
from safetensors.torch import load as tensors
from safetensors.torch import save

from deployments.accounts import OPERATOR, Account
from deployments.activations.actors.store import ActivationStore
from deployments.activations.facts import StoreError
from deployments.activations.filters import EVERYTHING, Choice
from deployments.activations.limits import Retention
from deployments.activations.state.owners import Owners
from deployments.client_data.profiles import StoredProfiles
from deployments.client_data.tensors import TensorFiles
from deployments.errors import RequestError
from deployments.points.profiles import Profile

POINT = "layers.0.output"
ALICE, BOB, ADMIN = Account("alice", is_admin=False), Account("bob", is_admin=False), Account("root")
RUN = 64 << 10  # about what a run takes


async def _given(batch):
    return batch


class Stored:
    """A store and its reader in this process, which are asked as over Ray."""

    def __init__(self, root, make, reader_of):
        self.root, self._make, self._times, self._reader_of = root, make, count(1), reader_of
        self._begin()

    def _begin(self):
        self.store = ActivationStore(str(self.root))
        self._reader = self._reader_of(self.store)

    def __getattr__(self, name):
        asked = self._reader if hasattr(self._reader, name) else self.store
        return lambda *args, **kwargs: asyncio.run(getattr(asked, name)(*args, **kwargs))

    def made(self, run, session, parts=1):
        point = {POINT: torch.randn(64, 256)}
        return self._make(run, point, session_id=session, parts=parts, created=float(next(self._times)))

    def write(self, made, fence, part=0):
        batches = [_given(batch) for batch in made.batches[part:]]
        return self.__getattr__("write")(made.facts, batches, part, fence)

    def record(self, session, account, run=None):
        """A request that records, from its admission to its end."""
        fence = self.claim(session, account) if account.owner else None
        return self.write(self.made(run or f"{session}-run", session), fence)

    def restart(self, rebuilt=False):
        self.close()
        for item in self.root.glob(".catalogue.sqlite3*") if rebuilt else ():
            item.unlink()
        self._begin()

    def close(self):
        self.store._writer.close()
        self.store._catalogue.close()

    def listed(self, account, **filter):
        pages, after = [], None
        while page := self.sessions(1, after, EVERYTHING._replace(**filter), account):
            pages += [one["id"] for one in page]
            after = pages[-1]
        return pages


@pytest.fixture
def stored(tmp_path, make, reader_of, monkeypatch):
    monkeypatch.setattr("deployments.activations.actors.store.node_writers", lambda root: [])
    stored = Stored(tmp_path / "root", make, reader_of)
    yield stored
    stored.close()


def refused(call, *args):
    with pytest.raises(RequestError) as error:
        call(*args)
    return error.value.status, error.value.code, error.value.field


def test_who_records_first_owns_a_session_also_for_a_store_that_reads_all_files_again(stored):
    fence = stored.claim("mine", ALICE)
    stored.record("mine", ALICE)
    for rebuilt in (False, True):
        assert refused(stored.claim, "mine", BOB) == (403, "session_not_yours", "session_id")
        assert stored.claim("mine", ALICE) == stored.claim("mine", ADMIN) == fence
        assert stored.session("mine", account=ADMIN)["owner"] == "alice"
        stored.restart(rebuilt)


def test_of_two_keys_that_claim_a_session_at_one_moment_one_gets_it(stored):
    async def race():
        sent = [stored.store.claim("raced", Account(f"key-{number}", is_admin=False)) for number in range(16)]
        return await asyncio.gather(*sent, return_exceptions=True)

    got = asyncio.run(race())
    assert len([one for one in got if isinstance(one, str)]) == 1
    assert {one.code for one in got if not isinstance(one, str)} == {"session_not_yours"}


def test_nobody_takes_the_automatic_session_that_will_be_anothers(stored):
    assert refused(stored.claim, "auto-2030-01-01-alice", BOB)[1] == "session_not_yours"
    stored.claim("auto-2030-01-01-alice", ADMIN)
    assert stored.claim("auto-2030-01-01-alice", ALICE)


def test_what_is_anothers_is_as_if_it_did_not_exist(stored):
    for session, account in (("a", ALICE), ("b", BOB), ("c", ALICE), ("d", BOB)):
        stored.record(session, account)
    assert [stored.listed(account) for account in (ALICE, BOB, ADMIN, OPERATOR)] == [
        ["a", "c"],
        ["b", "d"],
        *[[*"abcd"]] * 2,
    ]
    assert [run["run_id"] for run in stored.runs(account=BOB)] == ["b-run", "d-run"]
    assert refused(stored.runs, EVERYTHING, 9, "a-run", BOB) == refused(stored.runs, EVERYTHING, 9, "none", BOB)
    assert stored.runs(EVERYTHING._replace(session="a"), account=BOB) == []
    assert stored.session("a", account=BOB) is None
    assert stored.find_data(Choice("a"), None, BOB) is None
    tag, _ = stored.find_data(Choice("a"), None, ALICE)
    assert stored.data_page(Choice("a"), tag, 0, 8, ALICE)
    assert refused(stored.data_page, Choice("a"), tag, 0, 8, BOB)[0] == 412  # as where the session is gone
    assert stored.rows("a-run", [[POINT]], "all", 1 << 30, BOB) is None
    assert not stored.delete("a", BOB)
    assert not stored.pin("a", True, BOB)
    assert not stored.share("a", True, BOB)
    stored.pin("a", True, ALICE)
    assert not stored.delete("a", BOB)  # and not that it is pinned
    assert tensors(stored.rows("a-run", [[POINT]], "all", 1 << 30, ALICE))["0"].shape == (64, 256)
    assert stored.pin("a", False, ADMIN)
    assert stored.delete("a", ALICE)
    assert stored.claim("a", BOB)


def test_a_shared_session_is_for_everybody_to_read_and_its_owners_to_change(stored):
    stored.record("open", ALICE)
    assert stored.share("open", True, ALICE)
    stored.restart(rebuilt=True)
    assert stored.session("open", account=BOB)["shared"]
    assert stored.listed(BOB) == ["open"]
    tag, length = stored.find_data(Choice("open", None, None, "npz"), None, BOB)
    assert len(stored.data_page(Choice("open", None, None, "npz"), tag, 0, length, BOB)) == length
    assert stored.rows("open-run", [[POINT]], "all", 1 << 30, BOB)
    assert refused(stored.claim, "open", BOB)[0] == 403
    assert not any([stored.delete("open", BOB), stored.pin("open", True, BOB), stored.share("open", False, BOB)])
    assert stored.share("open", False, ALICE)
    assert stored.session("open", account=BOB) is None


def test_what_was_recorded_without_keys_is_admins(stored):
    stored.record("old", OPERATOR)
    stored.record("mine", ALICE)
    assert Owners(stored.root).of("old") is None
    assert [stored.listed(account) for account in (BOB, ADMIN)] == [[], ["mine", "old"]]
    assert stored.session("old", account=BOB) is None
    assert stored.rows("old-run", [[POINT]], "all", 1 << 30, BOB) is None
    assert refused(stored.claim, "old", BOB)[0] == 403
    assert not stored.delete("old", BOB)
    stored.record("old", ADMIN, "of-an-admin")
    assert stored.session("old", account=ADMIN)["owner"] is None


@pytest.mark.parametrize("parts", [1, 3])
def test_a_late_run_of_a_deleted_session_does_not_become_part_of_one_that_another_key_claims(stored, parts):
    late, fence = stored.made("late", "s", parts), stored.claim("s", ALICE)
    for part in range(parts - 1):
        stored.append("s", "late", part, [_given(late.batches[part])], 0, fence)
    stored.record("s", ALICE)
    assert stored.delete("s", ALICE)
    stored.record("s", BOB)
    with pytest.raises(StoreError, match="deleted"):
        stored.write(late, fence, parts - 1)
    stored.restart(rebuilt=True)  # what a store forgets that comes back by itself
    with pytest.raises(StoreError):
        stored.write(late, fence, parts - 1)
    assert [run["run_id"] for run in stored.session("s", account=BOB)["runs"]] == ["s-run"]


def test_a_late_run_of_an_admin_does_not_become_part_of_a_session_that_was_nobodys(stored):
    stored.record("old", OPERATOR)
    fence = stored.claim("old", ADMIN)
    stored.delete("old", ADMIN)
    stored.record("old", BOB)
    with pytest.raises(StoreError, match="deleted"):
        stored.write(stored.made("late", "old"), fence)


def test_a_full_store_evicts_the_sessions_of_the_runs_owner_alone(stored):
    stored.retain(Retention(max_store_bytes=7 * RUN // 2, delete_oldest=True))
    for session, account in (("b1", BOB), ("old", OPERATOR), ("a1", ALICE)):
        stored.record(session, account)
    stored.record("a2", ALICE)
    assert stored.listed(OPERATOR) == ["a2", "b1", "old"]
    with pytest.raises(StoreError, match="store's quota"):
        stored.record("r1", ADMIN)
    stored.record("new", OPERATOR)
    assert stored.listed(OPERATOR) == ["a2", "b1", "new"]
    assert sorted(Owners(stored.root).all()) == ["a2", "b1", "r1"]


# ---- tensors and profiles


FILE = save({"v": torch.ones(4)})


def test_a_tensor_file_is_its_owners_alone_and_the_same_bytes_of_another_are_another_file(tmp_path):
    files = TensorFiles(tmp_path)
    of = {account: files.put(FILE, 1 << 20, account)["id"] for account in (ALICE, BOB, ADMIN, OPERATOR)}
    assert len(set(of.values())) == 4
    for found in (files, TensorFiles(tmp_path)):
        assert [one["id"] for one in found.list(10, None, ALICE)] == [of[ALICE]]
        assert {one["id"]: one["owner"] for one in found.list(10, None, ADMIN)} == {
            of[account]: account.owner for account in of
        }
        for theirs in (of[BOB], of[ADMIN], of[OPERATOR]):
            assert found.read(theirs, ALICE) is None
            assert not found.delete(theirs, ALICE)
        assert found.read(of[OPERATOR], ADMIN) == found.read(of[BOB], ADMIN) == FILE
    assert files.delete(of[ALICE], ALICE)
    assert files.read(of[BOB], BOB) == FILE


def profile(name="calm", **fields):
    return Profile.model_validate({"name": name, "capture": {"points": [POINT]}} | fields)


def test_two_keys_may_both_have_a_profile_of_one_name(tmp_path):
    files = StoredProfiles(tmp_path)
    for account in (ALICE, BOB):
        files.put(profile(description=account.owner), account)
    files.put(profile("only"), BOB)
    for found in (files, StoredProfiles(tmp_path)):
        assert [found.get("calm", account)["description"] for account in (ALICE, BOB)] == ["alice", "bob"]
        assert [one["name"] for one in found.list(10, None, ALICE)] == ["calm"]
        assert found.get("only", ALICE) is None
        assert found.get("calm", ALICE, "bob") is None
        assert found.get("calm", ADMIN) is None
        assert found.get("calm", ADMIN, "bob")["owner"] == "bob"
        listed = [(one["name"], one["owner"]) for one in found.list(10, None, ADMIN)]
        assert listed == [("calm", "alice"), ("calm", "bob"), ("only", "bob")]
        assert [one["owner"] for one in found.list(10, "calm@alice", ADMIN)] == ["bob", "bob"]
        assert [one["name"] for one in found.list(10, "calm", BOB)] == ["only"]
        assert not found.delete("only", ALICE)
        assert not found.delete("calm", ALICE, "bob")
    assert files.delete("calm", ALICE)
    assert files.delete("calm", ADMIN, "bob")


def test_a_default_is_an_admins_and_everybody_reads_it_by_name_behind_their_own(tmp_path):
    files = StoredProfiles(tmp_path)
    files.put(profile(model="m", default=True, description="default"), ADMIN)
    assert files.get("calm", ALICE)["description"] == "default"
    assert [(one["name"], one["default"]) for one in files.list(10, None, ALICE)] == [("calm", True)]
    assert not files.delete("calm", ALICE)
    files.put(profile(model="m", description="own"), ALICE)
    assert [one["description"] for one in files.list(10, None, ALICE)] == ["own", "default"]
    assert files.get("calm", ALICE)["description"] == "own"
    assert [one["description"] for one in files.defaults(None)[1].values()] == ["default"]
    assert refused(files.put, profile(model="m", default=True), ALICE)[:2] == (403, "insufficient_permissions")
    same_name = Account("root", is_admin=False)
    assert refused(files.put, profile(), same_name)[:2] == (403, "insufficient_permissions")
    assert refused(files.delete, "calm", same_name)[:2] == (403, "insufficient_permissions")
