"""The models that benchmarks use: random weights of known shapes, the shipped model, and SmolLM2."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast, Qwen3Config

from deployments.demo_model import WEIGHTS
from deployments.options import DEMO, SMOLLM2, default_models_dir

FIELDS = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    "intermediate_size",
)
SIZES = {
    "tiny": (2048, 32, 2, 4, 2, 8, 64),
    "random-40m": (4096, 512, 12, 8, 4, 64, 1536),
    "qwen3-0.6b": (151936, 1024, 28, 16, 8, 128, 3072),
    "qwen3-8b": (151936, 4096, 36, 32, 8, 128, 12288),
}
SHAPES = {name: dict(zip(FIELDS, sizes, strict=True)) for name, sizes in SIZES.items()}
PRETRAINED = {DEMO: WEIGHTS, SMOLLM2: default_models_dir() / SMOLLM2}  # `make smollm2` brings the second
NAMES = (*SHAPES, *PRETRAINED)


def tokenizer(name: str) -> PreTrainedTokenizerFast:
    """The model's own tokenizer; the demo model's for random models, with a word more for each further token."""
    found = cast("PreTrainedTokenizerFast", AutoTokenizer.from_pretrained(PRETRAINED.get(name, WEIGHTS)))
    if name in SHAPES:
        found.add_tokens([f" w{id}" for id in range(len(found), SHAPES[name]["vocab_size"])])
    return found


def build(name: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Any:
    """A Hugging Face model, the same weights each time, whose texts no token ends.

    Not every peer can continue after one. Random models generate whole words only: half a character
    would be held back by every server that streams.

    Args:
        name: One of `NAMES`.
        dtype: The weights'.
        device: Where they go.
    """
    if name in PRETRAINED:
        hf = AutoModelForCausalLM.from_pretrained(PRETRAINED[name], dtype=dtype)
    else:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            config = Qwen3Config(max_position_embeddings=8192, **SHAPES[name])  # type: ignore[arg-type]
            hf = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
        with torch.no_grad():  # the demo tokenizer's pieces of words and characters get logits of 0
            hf.get_output_embeddings().weight[:1024] = 0
    hf.generation_config = GenerationConfig(do_sample=False)  # type: ignore[no-untyped-call]
    hf.config.eos_token_id = None
    moved: Any = hf.to(device)  # type: ignore[arg-type]
    return moved.eval().requires_grad_(False)


def save(name: str, directory: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write a model with a tokenizer and chat template, for servers to load."""
    build(name, dtype).save_pretrained(directory)
    tokenizer(name).save_pretrained(directory)
