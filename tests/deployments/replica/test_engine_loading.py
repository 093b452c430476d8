"""From options to an engine: names of models, and the reasons why a model is not loaded."""

from __future__ import annotations

import importlib.metadata
import json
import traceback

import pytest
import torch
from transformers import AutoModelForCausalLM, BloomConfig

from benchmarks.common.measured_models import tokenizer
from deployments.demo_model import WEIGHTS
from deployments.errors import LoadError
from deployments.model.load import revision_of
from deployments.options import Options
from deployments.replica.engine_loading import _sharing, description, load_engine


def test_why_a_load_failed_is_read_back_from_a_traceback():
    said = LoadError('no "point":\nthe nearest are a, b {c}', "savepoints[0].selector", "unknown_point", 400)
    try:
        try:
            raise OSError("before it")
        except OSError as error:
            raise said from error
    except LoadError:
        text = f"The deployment failed to start. Error:\n{traceback.format_exc()}\nSee the logs."
    read = LoadError.quoted(text)
    assert (read.message, read.field, read.code, read.status) == said.args


def test_a_text_without_a_load_error_quotes_none():
    assert LoadError.quoted("The actor died unexpectedly before finishing this task.") is None


def test_a_model_is_described_by_all_it_is_served_with_and_no_secret():
    given = {"threads": 2, "api_keys_file": "/keys", "archive": "s3://bucket/p?region=x"}
    options = Options(**given, public_url="https://host/v", model_id="mine", max_seq_len=100)
    model = load_engine(options).model
    told = description(options, model)
    assert Options.model_fields.keys() - told["options"].keys() == {"api_keys_file"}
    assert told["options"]["archive"] == "s3://bucket/p"
    came_out = {name: told["options"][name] for name in ("dtype", "attention", "device", "max_seq_len", "threads")}
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    assert came_out == {"dtype": "float32", "attention": "sdpa", "device": device, "max_seq_len": 100, "threads": 2}
    assert told["revision"] == model.revision == revision_of(str(WEIGHTS))
    assert told["source"] == str(WEIGHTS)
    assert told["versions"]["torch"] == importlib.metadata.version("torch")
    assert "/keys" not in json.dumps(told)
    assert (told["tokens_depend_on_batch"], told["quantization"]) == (False, None)
    assert bool(told["device_name"]) == (device != "cpu")


@pytest.mark.parametrize(("dtype", "depend"), [("float32", False), ("bfloat16", True), ("float16", True)])
def test_a_model_in_16_bits_says_that_its_tokens_depend_on_the_batch(dtype, depend):
    options = Options(dtype=dtype, threads=1)
    assert description(options, load_engine(options).model)["tokens_depend_on_batch"] is depend


def test_a_name_below_the_models_directory_is_that_model(tmp_path):
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "model").symlink_to(WEIGHTS)
    options = {"model": "some/model", "models_dir": str(tmp_path), "dtype": "float32", "threads": 1}
    engine = load_engine(Options(**options, savepoints=({"name": "last", "selector": "layers.-1"},)))
    assert engine.model.points.default_names() == ["last"]


@pytest.fixture
def alibi(tmp_path):
    """The name of a model with attention that the engine cannot batch, below `tmp_path`."""
    config = BloomConfig(vocab_size=2048, hidden_size=32, n_layer=2, n_head=4)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "tests/alibi")
    tokenizer("tiny").save_pretrained(tmp_path / "tests/alibi")
    return "tests/alibi"


def refused(**options) -> tuple[int, str | None, str]:
    with pytest.raises(LoadError) as refusal:
        load_engine(Options(**options))
    return refusal.value.status, refusal.value.field, refusal.value.code


def test_why_a_model_cannot_be_served_is_told_apart(tmp_path, alibi):
    assert refused(model=alibi, models_dir=str(tmp_path)) == (400, "model_id", "unsupported_model")
    assert refused(model="nobody/nothing") == (404, "model_id", "model_not_found")
    (tmp_path / "empty").mkdir()
    status, field, _ = refused(model=str(tmp_path / "empty"))
    assert (status in (400, 404), field) == (True, "model_id")


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch finds a GPU")
@pytest.mark.parametrize(("build", "said"), [(None, "is a build for CPUs"), ("13.0", "check nvidia-smi")])
def test_a_replica_without_the_gpu_that_it_was_given_says_so_before_it_looks_for_weights(build, said, monkeypatch):
    monkeypatch.setattr("torch.version.cuda", build)
    with pytest.raises(LoadError, match=said) as refusal:
        load_engine(Options(model="nobody/nothing", num_gpus=0.5))
    assert refusal.value.code == "no_gpu"
    assert refused(model="nobody/nothing", num_gpus=1, device="cpu") == (404, "model_id", "model_not_found")


def test_a_directory_where_the_replica_runs_is_no_model_by_its_relative_path(tmp_path, monkeypatch, alibi):
    monkeypatch.chdir(tmp_path)
    assert refused(model=alibi) == (404, "model_id", "model_not_found")


def test_replicas_of_one_machine_divide_the_memory_for_keys_and_values(monkeypatch):
    monkeypatch.setattr("deployments.model.device_memory.free_bytes", lambda device: 1 << 30)
    monkeypatch.setattr("deployments.model.device_memory.reserved_for_others", lambda model: 0)
    budgets = []
    for replicas in ({"num_replicas": 1}, {"autoscaling": {"min_replicas": 0, "max_replicas": 2}}):
        engine = load_engine(Options(threads=1, kv_fraction=0.8, **replicas))
        engine.step()
        budgets.append(engine.statistics.kv_budget_bytes)
    assert budgets[0] == pytest.approx(0.8 * 2**30, rel=0.01)
    assert budgets[1] == pytest.approx(budgets[0] / 2, rel=0.01)


@pytest.mark.parametrize(("num_gpus", "sharing"), [(None, 1), (0, 1), (0.25, 4), (0.4, 2), (0.6, 1), (1, 1), (2, 1)])
def test_replicas_divide_the_memory_of_a_gpu_that_they_share(num_gpus, sharing):
    assert _sharing(Options(num_gpus=num_gpus, num_replicas=3), "cuda") == sharing
