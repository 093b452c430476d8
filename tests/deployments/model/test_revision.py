"""A model's revision depends on its files' content, not on their place."""

from __future__ import annotations

import shutil

import pytest

from deployments.demo_model import WEIGHTS
from deployments.model import load
from deployments.model.load import revision_of

COMMIT = "8f3ec5a1b0c24f6d9e7a1b2c3d4e5f60718293a4"


@pytest.fixture
def copied(tmp_path):
    return shutil.copytree(WEIGHTS, tmp_path / "copied")


def test_a_copy_of_a_directory_is_of_the_same_revision(copied):
    assert revision_of(str(copied)) == revision_of(str(WEIGHTS))
    assert revision_of(str(copied)).startswith("sha256:")


@pytest.mark.parametrize(
    ("name", "same"),
    [
        *((name, True) for name in ("README.md", "requirements.txt", "training_args.bin", "trainer_state.json")),
        *((name, False) for name in ("modeling_mine.py", "vocab.txt", "additional_chat_templates/tools.jinja")),
    ],
)
def test_only_files_that_determine_how_a_model_answers_make_another_revision(copied, name, same):
    (copied / name).parent.mkdir(exist_ok=True)
    (copied / name).write_text("of how it answers")
    assert (revision_of(str(copied)) == revision_of(str(WEIGHTS))) == same


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "chat_template.jinja", "tokenizer.json"])
def test_one_byte_makes_another_revision(copied, name):
    data = bytearray((copied / name).read_bytes())
    data[len(data) // 2] ^= 1
    (copied / name).write_bytes(data)
    assert revision_of(str(copied)) != revision_of(str(WEIGHTS))


def test_of_a_large_file_pieces_count_from_its_first_byte_to_its_last(tmp_path, monkeypatch):
    monkeypatch.setattr(load, "PIECE_BYTES", 4)
    monkeypatch.setattr(load, "PIECES", 3)
    file = tmp_path / "model.safetensors"

    def of(data):
        file.write_bytes(data)
        return revision_of(str(tmp_path))

    plain = bytes(100)
    changed = [of(plain[:at] + b"x" + plain[at + 1 :]) != of(plain) for at in range(100)]
    assert [at for at in range(100) if changed[at]] == [0, 1, 2, 3, 48, 49, 50, 51, 96, 97, 98, 99]
    assert of(bytes(101)) != of(plain)


def test_a_repository_is_of_the_commit_that_its_files_are_of(tmp_path, monkeypatch):
    cached = tmp_path / "models--some--model"
    snapshot = cached / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(tmp_path), raising=True)
    (snapshot / "adapter_config.json").write_text("{}")
    assert revision_of("some/model") == revision_of("some/model", file="adapter_config.json") == COMMIT
    assert revision_of("some/model", "main") == COMMIT
    assert revision_of("some/model", COMMIT) == COMMIT


def test_where_the_files_are_gone_the_revision_is_not_known():
    assert revision_of("no/such-model") is None
