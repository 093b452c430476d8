"""Profiles are stored unchanged; a model has at most one default."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.accounts import OPERATOR, Account
from deployments.activations.facts import StoreError
from deployments.activations.files.disk import write
from deployments.client_data import profiles as stored_profiles
from deployments.client_data.profiles import MAX_BYTES, StoredProfiles
from deployments.errors import RequestError
from deployments.points.profiles import Profile

ZERO = {"op": "zero", "point": "layers.1.output", "tokens": {"prompt_last": 2}, "features": {"first": 3}}
PATCH = {"op": "replace", "point": "layers.*.output", "from": {"run_id": "r", "tokens": "prompt"}}
USER = Account(None, is_admin=False)
CAPTURE = {"points": ["norm.output"], "return": "inline", "dtype": "float32"}


def profile(name="p", **fields):
    return Profile.model_validate({"name": name, "interventions": [ZERO, PATCH]} | fields)


@pytest.fixture
def files(tmp_path):
    return StoredProfiles(tmp_path)


def defaults(files):
    return {model: found["name"] for model, found in files.defaults(None)[1].items()}


def test_a_profile_comes_back_as_it_was_sent_also_from_who_starts_again(files, tmp_path):
    kept = files.put(profile(capture=CAPTURE, description="mine", model="m"), USER)
    assert kept["interventions"] == [ZERO, PATCH]
    assert kept["capture"] == CAPTURE
    assert (kept["name"], kept["model"], kept["description"], kept["default"]) == ("p", "m", "mine", False)
    again = StoredProfiles(tmp_path)
    assert files.get("p") == again.get("p") == kept
    (listed,) = again.list(10, None)
    assert listed == {name: value for name, value in kept.items() if name not in ("interventions", "capture")}


def test_another_of_its_name_takes_its_place(files, tmp_path):
    files.put(profile(description="first"), USER)
    files.put(profile(capture=CAPTURE, interventions=None), USER)
    for one in (files, StoredProfiles(tmp_path)):
        assert one.get("p")["capture"] == CAPTURE
        assert one.get("p")["description"] is None
        assert len(one.list(10, None)) == 1


def test_each_is_a_file_and_one_that_cannot_be_read_is_passed_over(files, tmp_path, caplog):
    files.put(profile("mine"), Account("ann", is_admin=False))
    files.put(profile("all"), OPERATOR)
    folder = tmp_path / ".profiles"
    assert {path.name for path in folder.iterdir()} == {"mine@ann.json", "all.json"}
    (folder / "all.json").write_text("{")
    (folder / "other.json").write_text('{"created": 1, "default": false, "profile": {"name": "other"}}')
    (folder / ".new-1-mine@ann.json").write_text("{")
    (folder / "notes.txt").write_text("")
    again = StoredProfiles(tmp_path)
    assert [one["name"] for one in again.list(10, None)] == ["mine"]
    assert len(caplog.records) == 2


def test_a_crash_between_two_defaults_leaves_the_last_one(files, tmp_path, monkeypatch):
    files.put(profile("a", model="m", default=True), OPERATOR)

    def only_the_new(root, folder, name, data):
        if name == "b.json":
            return write(root, folder, name, data)
        raise OSError(28, "full")

    monkeypatch.setattr(stored_profiles, "write", only_the_new)
    with pytest.raises(StoreError, match="full"):
        files.put(profile("b", model="m", default=True), OPERATOR)
    for one in (files, StoredProfiles(tmp_path)):
        assert defaults(one) == {"m": "b"}
        assert [one["name"] for one in one.list(10, None) if one["default"]] == ["b"]


names, models = st.sampled_from(["a", "b", "c"]), st.sampled_from(["m", "n"])
changes = st.lists(
    st.one_of(
        st.tuples(st.just("put"), names, models, st.booleans()),
        st.tuples(st.just("delete"), names),
        st.just(("again",)),
    ),
    max_size=12,
)


@given(changes)
def test_whatever_comes_and_goes_a_model_has_the_default_that_was_made_last(tmp_path_factory, changes):
    root = tmp_path_factory.mktemp("root")
    files, kept, want, versions = StoredProfiles(root), {}, {}, [0]
    for change in changes:
        match change:
            case ("put", name, model, default):
                files.put(profile(name, model=model, default=default), OPERATOR)
                kept[name] = model
                want = {of: other for of, other in want.items() if other != name}
                want |= {model: name} if default else {}
            case ("delete", name):
                assert files.delete(name) is (name in kept)
                kept.pop(name, None)
                want = {of: other for of, other in want.items() if other != name}
            case _:
                files = StoredProfiles(root)
        version, found = files.defaults(None)
        assert {model: one["name"] for model, one in found.items()} == want
        assert {one["name"]: one["default"] for one in files.list(10, None)} == {
            name: name in want.values() for name in kept
        }
        assert files.defaults(version) is None
        versions.append(version)
    assert versions == sorted(versions)
    assert len(set(versions)) >= 1 + bool(kept)


def test_only_an_admin_makes_changes_or_unmakes_a_default(files):
    files.put(profile("mine", model="m"), USER)
    files.put(profile("theirs", model="m", default=True), OPERATOR)
    for change in (profile("mine", model="m", default=True), profile("theirs", model="m"), profile("theirs")):
        with pytest.raises(RequestError) as refused:
            files.put(change, USER)
        assert (refused.value.status, refused.value.code) == (403, "insufficient_permissions")
    assert defaults(files) == {"m": "theirs"}
    files.put(profile("mine"), USER)


def test_only_what_changes_a_default_is_news(files):
    files.put(profile("a", model="m", default=True), OPERATOR)
    version, _ = files.defaults(None)
    files.put(profile("b"), OPERATOR)
    files.delete("b")
    assert files.defaults(version) is None
    files.put(profile("a", model="m", default=True, description="changed"), OPERATOR)
    assert files.defaults(version) is not None


def test_size_and_number_are_bounded(files, monkeypatch):
    long = {"op": "add", "point": "layers.1.output", "vector": [0.12345678901] * (MAX_BYTES // 12)}
    with pytest.raises(RequestError) as refused:
        files.put(profile(interventions=[long]), OPERATOR)
    assert refused.value.code == "profile_too_large"
    monkeypatch.setattr(stored_profiles, "MAX_PROFILES", 2)
    files.put(profile("a"), OPERATOR)
    files.put(profile("b"), OPERATOR)
    files.put(profile("a"), OPERATOR)
    with pytest.raises(RequestError, match="delete some"):
        files.put(profile("c"), OPERATOR)


@pytest.mark.parametrize(
    "name", ["../secret", "..", ".defaults", "/etc/passwd", "a/b", "x\0y", "", "none", "p" * 65, "\ud800"]
)
def test_what_can_be_no_name_is_no_profiles(files, name):
    files.put(profile(), OPERATOR)
    assert files.get(name) is None
    assert not files.delete(name)
    with pytest.raises(ValueError, match="name|none"):
        profile(name)


@pytest.mark.parametrize(
    "fields",
    [
        {"interventions": None},
        {"default": True},
        {"interventions": []},
        {"interventions": [{"op": "zero"}]},
        {"capture": {"pionts": []}},
        {"unknown": 1},
    ],
)
def test_what_can_do_nothing_is_no_profile(fields):
    with pytest.raises(ValueError, match="validation error"):
        profile(**fields)
