"""A model's name: the shipped model, a path, a name below the directory of models, or one of the hub."""

from __future__ import annotations

import pytest

from deployments.demo_model import WEIGHTS
from deployments.errors import LoadError
from deployments.model_files.names import source
from deployments.options import DEMO, Options, default_models_dir
from deployments.replica.engine_loading import load_engine
from tests.deployments.model_files.gguf_writing import write


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A `$VITRINE_HOME` without models."""
    monkeypatch.setenv("VITRINE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_the_model_that_ships_and_those_of_the_hub_have_their_names():
    assert source(DEMO) == str(WEIGHTS)
    assert source("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"


def test_a_directory_is_named_by_its_absolute_path(tmp_path, monkeypatch):
    (tmp_path / "some" / "model").mkdir(parents=True)
    assert source(str(tmp_path / "some" / "model")) == str(tmp_path / "some" / "model")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LoadError, match="absolute"):
        source("some/model")


def test_a_name_is_looked_up_in_the_directory_of_models_before_the_hub(home, tmp_path):
    (home / "models" / "smollm2").mkdir(parents=True)
    (tmp_path / "others" / "org" / "smollm2").mkdir(parents=True)
    assert source("smollm2") == str(home / "models" / "smollm2")
    assert source("org/smollm2") == "org/smollm2"
    assert source("org/smollm2", str(tmp_path / "others")) == str(tmp_path / "others" / "org" / "smollm2")
    assert Options().models_dir == str(default_models_dir()) == str(home / "models")


def test_smollm2_is_refused_with_the_command_that_brings_it(home, tmp_path):
    with pytest.raises(LoadError, match="run `make smollm2`") as refused:
        load_engine(Options(model="smollm2"))
    assert str(home / "models" / "smollm2") in refused.value.message
    assert (refused.value.code, refused.value.status) == ("model_not_found", 404)
    with pytest.raises(LoadError, match="run `make smollm2`"):
        source("smollm2", str(tmp_path))


def test_a_gguf_file_is_served_from_its_path_by_its_name(home, tmp_path):
    options = Options(model=str(write(tmp_path / "tiny.Q8.gguf")), threads=1)
    assert options.served_name == "tiny.Q8"
    engine = load_engine(options)
    directory = source(options.model)
    assert engine.model.name == directory
    assert directory.startswith(f"{home}/models/.gguf/tiny.Q8-")


@pytest.mark.parametrize("relative", ["tiny.gguf", "models/tiny.gguf", "../tiny.gguf"])
def test_a_gguf_file_is_named_by_its_absolute_path_alone(tmp_path, monkeypatch, relative):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for folder in (tmp_path, tmp_path / "here"):
        (folder / "tiny.gguf").write_bytes(b"GGUF")
    with pytest.raises(LoadError, match="absolute path") as refused:
        source(relative, str(tmp_path))  # no file of the directory of models either: a client may send such a name
    assert (refused.value.code, refused.value.status) == ("model_not_found", 404)


def test_a_converted_file_has_no_name_that_a_client_may_send(tmp_path):
    from pydantic import ValidationError

    from serve_app.schemas.models import LoadRequest

    kept = source(str(write(tmp_path / "tiny.gguf")))
    name = kept.removeprefix(f"{default_models_dir()}/")
    assert source(name) == kept  # an operator's word
    with pytest.raises(ValidationError):
        LoadRequest(model_id=name)
