"""The tokenizer in a GGUF file, or the reason why it cannot be used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from deployments.errors import LoadError

# How the text of a byte-level vocabulary is split before merging, by `tokenizer.ggml.pre`, if transformers uses only
# GPT-2's expression: those of `DIGITS` split off each digit first, those of `GPT2` use that expression alone. As in
# llama.cpp's `src/llama-vocab.cpp`.
DIGITS = {"codeshell", "command-r", "exaone", "minerva-7b", "refact", "smollm", "starcoder"}
GPT2 = {"exaone4", "gpt-2", "jais", "mpt", "olmo", "phi-2", "roberta-bpe", "trillion"}
# Vocabularies that start every text with a token and look up whole words first, as in the same file.
LLAMA3 = {"falcon3", "llama-bpe", "llama-v3", "llama3", "tekken"}


def tokenizer_of(file: Path, facts: dict[str, Any], context: int | None) -> Any:
    """The tokenizer of a GGUF file, which splits text like the model's own.

    Args:
        file: The file.
        facts: Its metadata.
        context: The most tokens of a text.

    Raises:
        LoadError: Its way of splitting text is unknown.
    """
    pre = facts.get("tokenizer.ggml.pre")
    begun = {"add_bos_token": True} if pre in LLAMA3 and "tokenizer.ggml.add_bos_token" not in facts else {}
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True, **begun)
    backend = tokenizer.backend_tokenizer
    if facts.get("tokenizer.ggml.model") == "gpt2" and isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel):
        if pre in DIGITS:
            digits = pre_tokenizers.Digits(individual_digits=True)
            backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
        elif pre not in GPT2:
            message = f"{file} splits text by the pre-tokenizer {pre!r}, which is not supported"
            raise LoadError(message, "model_id", "unsupported_model")
    if pre in LLAMA3:
        backend.model.ignore_merges = True
    if context:
        tokenizer.model_max_length = context
    return tokenizer
