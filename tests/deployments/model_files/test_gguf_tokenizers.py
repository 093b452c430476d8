"""A tokenizer read from a GGUF file splits every text as the original does."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers

from deployments.model_files.gguf import tokenizer_of
from tests.deployments.model_files.gguf_writing import vocabulary, write

TEXTS = st.text(alphabet=st.sampled_from("the cat's hat; 1289²½٣٤ \n\té漢🙂"), max_size=30) | st.text(max_size=20)
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
DIGITS = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2])


@functools.cache
def converted(pre: str, **facts: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        file = write(Path(folder) / "tiny.gguf", pre=pre, **facts)
        metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre}
        return tokenizer_of(file, metadata | {name.replace("__", "."): value for name, value in facts.items()}, 96)


def expected(splits: pre_tokenizers.PreTokenizer) -> Tokenizer:
    tokenizer = Tokenizer.from_str(vocabulary().to_str())
    tokenizer.pre_tokenizer = splits
    return tokenizer


@pytest.mark.parametrize(("pre", "splits"), [("smollm", DIGITS), ("starcoder", DIGITS), ("gpt-2", GPT2)])
@given(text=TEXTS)
def test_texts_have_the_tokens_of_the_original(pre, splits, text):
    ids = converted(pre)(text)["input_ids"]
    assert ids == expected(splits).encode(text).ids
    assert converted(pre).decode(ids) == text


def test_digits_stand_alone_where_the_pre_tokenizer_wants_it():
    assert converted("smollm").tokenize(" 12") == ["Ġ", "1", "2"]
    assert converted("gpt-2").tokenize(" 12") == ["Ġ12"]


@pytest.mark.parametrize("pre", ["llama-bpe", "tekken"])
def test_llama_3_s_texts_begin_with_a_token_unless_the_file_says_otherwise(pre):
    assert converted(pre)("the cat")["input_ids"][0] == converted(pre).bos_token_id == 1
    assert converted(pre, tokenizer__ggml__add_bos_token=False)("the cat")["input_ids"][0] != 1
    assert converted("smollm")("the cat")["input_ids"][0] != 1
    assert converted("smollm", tokenizer__ggml__add_bos_token=True)("the cat")["input_ids"][0] == 1
