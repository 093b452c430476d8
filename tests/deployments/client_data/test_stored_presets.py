"""Presets are stored unchanged; a model has at most one default."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.accounts import OPERATOR, Account
from deployments.activations.facts import StoreError
from deployments.activations.files.disk import write
from deployments.client_data import presets as stored_presets
from deployments.client_data.presets import MAX_BYTES, StoredPresets
from deployments.errors import RequestError

ZERO = {"op": "zero", "point": "layers.1.output", "tokens": {"prompt_last": 2}, "features": {"first": 3}}
PATCH = {"op": "replace", "point": "layers.*.output", "from": {"run_id": "r", "tokens": "prompt"}}
USER = Account(None, is_admin=False)
CAPTURE = {"points": ["norm.output"], "return": "inline", "dtype": "float32"}


def preset(name="p", **fields):
    return {"name": name, "interventions": [ZERO, PATCH]} | fields


@pytest.fixture
def files(tmp_path):
    return StoredPresets(tmp_path)


def defaults(files):
    return {model: found.name for model, found in files.defaults(None)[1].items()}


def test_a_preset_comes_back_as_it_was_sent_also_from_who_starts_again(files, tmp_path):
    kept = files.put(preset(capture=CAPTURE, description="mine", model="m"), USER)
    assert kept["interventions"] == [ZERO, PATCH]
    assert kept["capture"] == CAPTURE
    assert (kept["name"], kept["model"], kept["description"], kept["default"]) == ("p", "m", "mine", False)
    again = StoredPresets(tmp_path)
    assert files.get("p") == again.get("p") == kept
    (listed,) = again.list(10, None)
    assert listed == {name: value for name, value in kept.items() if name not in ("interventions", "capture")}


def test_each_is_a_file_and_one_that_cannot_be_read_is_passed_over(files, tmp_path, caplog):
    files.put(preset("mine"), Account("ann", is_admin=False))
    files.put(preset("all"), OPERATOR)
    folder = tmp_path / ".presets"
    assert {path.name for path in folder.iterdir()} == {"mine@ann.json", "all.json"}
    (folder / "all.json").write_text("{")
    (folder / "other.json").write_text('{"created": 1, "default": false}')
    (folder / ".new-1-mine@ann.json").write_text("{")
    (folder / "notes.txt").write_text("")
    again = StoredPresets(tmp_path)
    assert [one["name"] for one in again.list(10, None)] == ["mine"]
    assert len(caplog.records) == 2


def test_a_crash_between_two_defaults_leaves_the_last_one(files, tmp_path, monkeypatch):
    files.put(preset("a", model="m", default=True), OPERATOR)

    def only_the_new(root, folder, name, data):
        if name == "b.json":
            return write(root, folder, name, data)
        raise OSError(28, "full")

    monkeypatch.setattr(stored_presets, "write", only_the_new)
    with pytest.raises(StoreError, match="full"):
        files.put(preset("b", model="m", default=True), OPERATOR)
    for one in (files, StoredPresets(tmp_path)):
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
    files, kept, want, versions = StoredPresets(root), {}, {}, [0]
    for change in changes:
        match change:
            case ("put", name, model, default):
                files.put(preset(name, model=model, default=default), OPERATOR)
                kept[name] = model
                want = {of: other for of, other in want.items() if other != name}
                want |= {model: name} if default else {}
            case ("delete", name):
                assert files.delete(name) is (name in kept)
                kept.pop(name, None)
                want = {of: other for of, other in want.items() if other != name}
            case _:
                files = StoredPresets(root)
        version, found = files.defaults(None)
        assert {model: one.name for model, one in found.items()} == want
        assert {one["name"]: one["default"] for one in files.list(10, None)} == {
            name: name in want.values() for name in kept
        }
        assert files.defaults(version) is None
        versions.append(version)
    assert versions == sorted(versions)
    assert len(set(versions)) >= 1 + bool(kept)


def test_only_an_admin_makes_changes_or_unmakes_a_default(files):
    files.put(preset("mine", model="m"), USER)
    files.put(preset("theirs", model="m", default=True), OPERATOR)
    for change in (preset("mine", model="m", default=True), preset("theirs", model="m"), preset("theirs")):
        with pytest.raises(RequestError) as refused:
            files.put(change, USER)
        assert (refused.value.status, refused.value.code) == (403, "insufficient_permissions")
    assert defaults(files) == {"m": "theirs"}
    files.put(preset("mine"), USER)


def test_size_and_number_are_bounded(files, monkeypatch):
    long = {"op": "add", "point": "layers.1.output", "vector": [0.12345678901] * (MAX_BYTES // 12)}
    with pytest.raises(RequestError) as refused:
        files.put(preset(interventions=[long]), OPERATOR)
    assert refused.value.code == "preset_too_large"
    monkeypatch.setattr(stored_presets, "MAX_PRESETS", 2)
    files.put(preset("a"), OPERATOR)
    files.put(preset("b"), OPERATOR)
    files.put(preset("a"), OPERATOR)
    with pytest.raises(RequestError, match="delete some"):
        files.put(preset("c"), OPERATOR)


def test_the_presets_of_an_owner_are_bounded_together(files, monkeypatch):
    monkeypatch.setattr(stored_presets, "MAX_OWN_BYTES", 500)
    files.put(preset("a"), Account("ann"))
    with pytest.raises(RequestError, match="delete some"):
        files.put(preset("b", description="x" * 200), Account("ann"))
    files.put(preset("b", description="x" * 200), Account("bob"))


@pytest.mark.parametrize("name", ["../secret", "..", ".defaults", "/etc/passwd", "a/b", "x\0y", "", "\ud800"])
def test_what_can_be_no_name_is_no_presets(files, name):
    files.put(preset(), OPERATOR)
    assert files.get(name) is None
    assert not files.delete(name)
