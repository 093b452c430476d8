"""Models whose engine does what transformers does pass, and faults that are put in are found."""

from __future__ import annotations

import json

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from deployments.engine.edit_plans import Plan
from deployments.model.batch import Batch
from deployments.model.hooks import Hooks
from deployments.model.model import Model
from deployments.model.validate import main, row_errors, validate
from deployments.places.watching import first_tensor, with_first
from tests.deployments.conftest import CONTEXT, _byte_tokenizer
from tests.deployments.model.architectures import built, table
from vitrine.points import TRANSFORMER_LENS

WINDOW = {"sliding_window": 7}  # shorter than nearly every prompt
# Architecture -> the settings of its model that are not those of `built`. One that is served from now on is added here.
MODELS = {
    "llama": {"hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 1},
    "qwen3": {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 10},
    "gemma2": WINDOW,
    "gemma3_text": {**WINDOW, "hidden_size": 40, "num_attention_heads": 5, "num_key_value_heads": 1},
    "gpt2": {"n_embd": 18, "n_head": 3, "attn_implementation": "eager"},
    "gpt_neox": {"num_attention_heads": 3, "hidden_size": 24},
    "falcon": {"alibi": True},
    "bloom": {},
    "gpt_neo": {"window_size": 7},
    "olmo2": {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 24},
    "phi3": WINDOW,
    "mixtral": WINDOW,
    "qwen3_moe": {"num_experts": 5},
    "deepseek_v3": {},
    "gpt_oss": WINDOW,
    "whisper": {},
    "bert": {},
    "granite_swa": WINDOW,
    "llama4_text": {},
    "qwen3_5_text": {},
    "falcon_h1": {},
    "mamba2": {},
}
# Whose kinds of layers others have too.
MORE = {"qwen3", "gemma2", "gpt_neox", "bloom", "gpt_neo", "phi3", "mixtral", "granite_swa"}
UNPREEMPTED = ("phi3", "mixtral", "falcon_h1", "mamba2")  # all layers have windows, or states fill the memory


def tiny(model_type, dtype=torch.float32, **settings):
    return Model(built(model_type, **settings).to(dtype), _byte_tokenizer(), model_type, CONTEXT)


@pytest.mark.slow
@pytest.mark.cpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=pytest.mark.long) if name in MORE else name for name in MODELS]
)
def test_what_is_recorded_and_generated_is_what_transformers_computes(model_type):
    report = validate(tiny(model_type, **MODELS[model_type]))
    assert report.ok, report.text()
    assert not report.skipped
    there = {result.point for result in report.results}
    lacks = [hook for hook, site in TRANSFORMER_LENS.items() if site not in there]
    assert (report.served, ", ".join(lacks)) == table()[model_type]
    assert report.preempted or model_type in UNPREEMPTED


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_an_expert_that_rounding_chooses_is_no_fault(dtype):
    report = validate(tiny("qwen3_moe", dtype))
    assert report.ok, report.text()
    unstable = sum(result.unstable for result in report.results)
    assert 0 < unstable < 0.02 * sum(result.rows for result in report.results)


def exchange_rows(own):
    def see(self, place, value):
        rows = first_tensor(value)
        return own(self, place, rows if rows is None else with_first(value, rows.roll(1, rows.ndim - 2)))

    return see


def fail(own):
    def see(self, place, value):
        if self._visit:  # hooks stay on the model after the engine's forward passes
            raise RuntimeError("a fault")

    return see


def shift_positions(own):
    """Of forward passes of several sequences."""

    def inputs(self):
        ids, positions = own(self)
        return ids, positions + (len(self.spans) > 1)

    return inputs


def leak(own):
    """What is changed for one sequence comes to others."""

    def apply(self, place, value, reader=None):
        new = own(self, place, value, reader)
        return None if new is None else new.roll(1, 0)

    return apply


@pytest.mark.parametrize(
    ("model_type", "dtype", "of", "name", "fault", "sound"),
    [
        ("gpt2", torch.float32, Hooks, "_see", exchange_rows, set()),
        ("qwen3_moe", torch.bfloat16, Hooks, "_see", exchange_rows, set()),
        ("gpt2", torch.float32, Hooks, "_see", fail, set()),
        ("gpt2", torch.float32, Batch, "inputs", shift_positions, {"alone"}),
        ("gpt2", torch.float32, Plan, "apply", leak, {"alone"}),
    ],
)
def test_faults_are_found_in_the_runs_that_have_them(model_type, dtype, of, name, fault, sound, monkeypatch):
    model = tiny(model_type, dtype)
    monkeypatch.setattr(of, name, fault(getattr(of, name)))
    report = validate(model)
    wrong = {result.run for result in report.results if not result.ok}
    assert wrong == {"alone", "together", "add"} - sound, report.text()


def test_rows_are_compared_one_by_one():
    want = torch.eye(3)
    got = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.1, 0.0], [0.0, 0.0, torch.nan]])
    torch.testing.assert_close(row_errors(got, want), torch.tensor([0.0, 0.1, torch.inf]))
    assert row_errors(got[:2], want).isinf().all()


def test_the_command_says_by_its_status_what_it_found(tmp_path, monkeypatch, capsys):
    pytest.importorskip("nnsight")
    file = tmp_path / "results.json"
    arguments = ["vitrine-demo", "--set", "threads=1", "--json", str(file)]
    assert main([*arguments, "--against", "transformers,nnsight", "--dtype", "float32"]) == 0
    results = json.loads(file.read_text())["results"]
    assert {result["against"] for result in results} == {"transformers", "nnsight"}
    assert {result["layer"] for result in results} == {None, 0, 3, 5}
    monkeypatch.setattr(Hooks, "_see", exchange_rows(Hooks._see))
    assert main(arguments) == 1
    assert "WRONG" in capsys.readouterr().out
    assert main(["vitrine-demo", "--dtype", "int8"]) == 2
    assert "dtype: must be" in capsys.readouterr().err
    assert main([str(tmp_path)]) == 2


def test_the_page_has_every_causal_architecture_of_transformers():
    assert set(table()) == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
