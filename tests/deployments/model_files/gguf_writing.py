"""Small GGUF files, written by the format's own package from a random Llama and a small byte-level vocabulary."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter, TokenType, get_tensor_name_map, quants
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
HEADS, KV_HEADS = 4, 2


@functools.cache
def vocabulary() -> Tokenizer:
    """A byte-level vocabulary with numbers in it, of which digits that stand alone make no use."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["the cat, the hat and the bat; 12 cats sat ٣٤ on 56 mats"] * 20, trainer)
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, tokenizer.pre_tokenizer])
    return tokenizer


@functools.cache
def llama() -> LlamaForCausalLM:
    """A random Llama of two layers, untied, whose heads share keys by twos."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary().get_vocab_size(),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=96,
        initializer_range=0.2,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        rms_norm_eps=1e-4,
    )
    return LlamaForCausalLM(config).eval()


def tensors() -> dict[str, np.ndarray[Any, Any]]:
    """The Llama's weights by their names in the file, rows of queries and keys in the file's order."""
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, 2)
    found = {}
    for name, weight in llama().state_dict().items():
        values = weight.numpy()
        for part, heads in (("q_proj", HEADS), ("k_proj", KV_HEADS)):
            if part in name:
                values = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        found[f"{names.get_name(name.removesuffix('.weight'))}.weight"] = values
    return found


def write(
    file: Path,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    *,
    architecture: str = "llama",
    pre: str | None = "smollm",
    weights: dict[str, np.ndarray[Any, Any]] | None = None,
    **facts: str | int | bool,
) -> Path:
    """Write one.

    Args:
        file: Where.
        kind: Of the matrices; vectors stay float32, as always.
        architecture: Its name in the file.
        pre: The pre-tokenizer's.
        weights: By default `tensors()`.
        facts: More metadata, `__` for each dot of its name.
    """
    writer, config = GGUFWriter(file, architecture), llama().config
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    _add_tokenizer(writer, pre)
    for name, value in facts.items():
        add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32}[type(value)]
        add(name.replace("__", "."), value)
    for name, values in (tensors() if weights is None else weights).items():
        stored = GGMLQuantizationType.F32 if values.ndim == 1 else kind
        writer.add_tensor(name, quants.quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add_tokenizer(writer: GGUFWriter, pre: str | None) -> None:
    written = json.loads(vocabulary().to_str())["model"]
    writer.add_tokenizer_model("gpt2")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    tokens = sorted(written["vocab"], key=written["vocab"].get)
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL if token in SPECIAL else TokenType.NORMAL for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in written["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
