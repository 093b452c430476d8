"""Small random models of many architectures, built from their configs, and the shipped model."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from deployments.demo_model import WEIGHTS
from deployments.model.load import load
from deployments.model.model import Model
from tests import profiles  # noqa: F401 - also where tests/conftest.py is left out

DEVICE = os.environ.get("VITRINE_TEST_DEVICE", "cpu")  # of the models
CONTEXT = 96
WINDOW = 5  # shorter than nearly every prompt of the tests

# Weights this large make attention sharp, so that a wrong mask or position changes every logit.
COMMON: dict[str, Any] = {
    "vocab_size": 256,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SIZES: dict[str, Any] = {
    **COMMON,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
FALCON = {key: value for key, value in SIZES.items() if key != "intermediate_size"}
OPT = {**COMMON, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 32,
}

DELTA_NET = {
    **GROUPED,
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 3,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
MAMBA_2 = {"mamba_d_ssm": 24, "mamba_n_heads": 3, "mamba_d_head": 8, "mamba_d_state": 5, "mamba_chunk_size": 4}

LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]

SERVED: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3Config", {**GROUPED, "head_dim": 8}),
    "qwen3_windows": (
        "Qwen3Config",
        {**GROUPED, "head_dim": 8, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {**GROUPED, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "qwen2": ("Qwen2Config", GROUPED),
    "llama": ("LlamaConfig", GROUPED),
    "gpt2": ("GPT2Config", {**COMMON, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": CONTEXT}),
    "gpt_neox": ("GPTNeoXConfig", SIZES),
    "gpt_neox_sequential": ("GPTNeoXConfig", {**SIZES, "use_parallel_residual": False}),
    "mistral": ("MistralConfig", {**GROUPED, "sliding_window": WINDOW}),
    "gemma2": ("Gemma2Config", {**GROUPED, "head_dim": 8, "sliding_window": WINDOW}),
    "gemma3": (
        "Gemma3TextConfig",
        {**GROUPED, "head_dim": 8, "sliding_window": WINDOW, "layer_types": LAYER_TYPES},
    ),
    "opt": ("OPTConfig", {**OPT, "word_embed_proj_dim": 32}),
    "opt_norms_behind": ("OPTConfig", {**OPT, "word_embed_proj_dim": 16, "do_layer_norm_before": False}),
    "phi3": ("Phi3Config", {**GROUPED, "sliding_window": WINDOW}),
    "olmo2": ("Olmo2Config", GROUPED),
    "granite": ("GraniteConfig", {**GROUPED, "residual_multiplier": 0.22}),
    "exaone4": ("Exaone4Config", {**GROUPED, "sliding_window": WINDOW, "layer_types": LAYER_TYPES}),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            **SIZES,
            **{"num_attention_heads": 3, "num_key_value_heads": 3, "q_lora_rank": 12, "kv_lora_rank": 10},
            **{"qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5, "first_k_dense_replace": 1},
            **{"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
            "moe_intermediate_size": 16,
        },
    ),
    "llama4": (
        "Llama4TextConfig",
        {
            **GROUPED,
            **{"num_attention_heads": 6, "head_dim": 6, "intermediate_size_mlp": 40, "num_local_experts": 4},
            **{"interleave_moe_layer_step": 2, "no_rope_layer_interval": 2},
            **{"attention_chunk_size": 2 * WINDOW, "floor_scale": WINDOW, "attn_scale": 0.7},
        },
    ),
    "gemma4_shared": (
        "Gemma4TextConfig",
        {
            **{**GROUPED, "head_dim": 8, "global_head_dim": 12, "sliding_window": WINDOW, "num_kv_shared_layers": 1},
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            **{"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 256},
        },
    ),
    "diffllama": ("DiffLlamaConfig", {**GROUPED, "num_attention_heads": 6, "head_dim": 8}),
    "falcon_parallel": ("FalconConfig", {**FALCON, "alibi": False, "multi_query": True, "parallel_attn": True}),
    "falcon_two_norms": (
        "FalconConfig",
        {**FALCON, "alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    "falcon_sequential": ("FalconConfig", {**FALCON, "alibi": False, "multi_query": False, "parallel_attn": False}),
}
HYBRID: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("Qwen3NextConfig", DELTA_NET),
    "falcon_h1": ("FalconH1Config", {**GROUPED, "head_dim": 8, **MAMBA_2}),
    "jamba": (
        "JambaConfig",
        {**GROUPED, "attn_layer_period": 3, "attn_layer_offset": 1, "mamba_d_state": 5, "num_experts": 2},
    ),
    "lfm2": ("Lfm2Config", {**GROUPED, "layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 4}),
    "mamba2": (
        "Mamba2Config",
        {**COMMON, "head_dim": 16, "hidden_size": 24, "num_hidden_layers": 3, "num_heads": 3, "n_groups": 1},
    ),
}
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3_longrope": (
        "Phi3Config",
        {**GROUPED, "original_max_position_embeddings": 32, "rope_parameters": LONG_ROPE},
    ),
    "falcon_alibi": ("FalconConfig", {**FALCON, "alibi": True, "multi_query": False, "parallel_attn": False}),
    "gpt_neo": (
        "GPTNeoConfig",
        {
            **COMMON,
            "hidden_size": 32,
            "num_layers": 3,
            "num_heads": 4,
            "window_size": WINDOW,
            "attention_types": [[["global", "local"], 1], [["global"], 1]],
        },
    ),
    "bloom": ("BloomConfig", {"vocab_size": 256, "hidden_size": 32, "n_layer": 3, "n_head": 4}),
}


def _byte_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: id for id, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def _build(architecture: str, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    config_class, settings = (SERVED | HYBRID | REFUSED)[architecture]
    config = getattr(transformers, config_class)(**{**settings, **overrides})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        hf = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return hf.eval().to(DEVICE)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if DEVICE != "cpu" and item.get_closest_marker("cpu"):
        pytest.skip("about a CPU")


@functools.cache
def _tiny(architecture: str, **overrides: Any) -> Model:
    return Model(_build(architecture, **overrides), _byte_tokenizer(), architecture)


@functools.cache
def _demo() -> Model:
    return load(str(WEIGHTS), dtype="float32", device=DEVICE)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Matrices this small only lose by more threads."""
    torch.set_num_threads(1)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Enough for torch to divide large loops, and for the attention kernel to divide heads."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=SERVED)
def architecture(request: pytest.FixtureRequest) -> str:
    """The name of each architecture that is served, one after the other."""
    return str(request.param)


@pytest.fixture(scope="session")
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """256 tokens, one per byte."""
    return _byte_tokenizer()


@pytest.fixture(scope="session")
def build() -> Callable[..., Any]:
    """Makes a new Hugging Face model: `build("llama", num_hidden_layers=2)`."""
    return _build


@pytest.fixture(scope="session")
def tiny() -> Callable[..., Model]:
    """Gives a model as the engine takes it, the same one each time: change nothing about it."""
    return _tiny


@pytest.fixture(scope="session")
def demo() -> Model:
    """The model that ships. It may be trained anew: claim nothing about what it says."""
    return _demo()
