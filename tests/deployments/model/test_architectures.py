"""The table of architectures in docs/models.md is what this version does."""

from __future__ import annotations

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.deployments.model.architectures import outcome, table

SOME = ["apertus", "bert", "bloom", "codegen", "deepseek_v3", "gemma3n_text", "gemma4_text", "gpt_oss", "granitemoe"]
SOME += ["granitemoeshared", "mpt", "prophetnet", "qwen3_next", "whisper"]


def test_it_has_every_causal_architecture_of_transformers():
    assert set(table()) == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


@pytest.mark.cpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", SOME)
def test_it_says_how_each_is_served(model_type):
    assert outcome(model_type) == table()[model_type]
