"""A token's bytes are what it adds to a text, for every kind of tokenizer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from deployments.chat.token_texts import TokenTexts
from deployments.engine.request import LayerTokens, LensLayers, Logprob


def fallback_tokenizer():
    """In the manner of Llama's: spaces as U+2581, unknown characters as bytes."""
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "▁b", "ab", "▁ab"]
    merges = [("▁", "a"), ("▁", "b"), ("a", "b"), ("▁a", "b")]
    model = models.BPE({piece: i for i, piece in enumerate(pieces)}, merges, unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    strip = decoders.Strip(" ", 1, 0)
    replace = decoders.Replace("▁", " ")
    tokenizer.decoder = decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse(), strip])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")


def joined(token_texts, tokens):
    return b"".join(token_texts.of(token).raw or b"" for token in tokens).decode()


@given(st.text(max_size=20))
def test_bytes_of_a_byte_level_tokenizer_join_to_the_text(demo, byte_tokenizer, text):
    for tokenizer in (demo.tokenizer, byte_tokenizer):
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        want = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert joined(TokenTexts(tokenizer), tokens) == want


@given(st.text("ab é北👩", max_size=12))
def test_bytes_of_a_tokenizer_with_byte_fallback_join_to_the_text(text):
    tokenizer = fallback_tokenizer()
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert joined(TokenTexts(tokenizer), tokens) == (f" {text}" if text else "")


def test_a_piece_of_a_character_is_written_as_its_bytes(byte_tokenizer):
    token_texts = TokenTexts(byte_tokenizer)
    euro = [token_texts.of(token) for token in byte_tokenizer("€")["input_ids"]]
    assert [(one.text, one.raw) for one in euro] == [("\\xe2", b"\xe2"), ("\\x82", b"\x82"), ("\\xac", b"\xac")]


def test_a_special_token_is_written_and_has_no_bytes(demo):
    assert TokenTexts(demo.tokenizer).of(demo.tokenizer.eos_token_id)[:2] == (demo.tokenizer.eos_token, None)


@pytest.mark.parametrize("decoder", [decoders.WordPiece(), decoders.WordPiece("##", False)])
def test_a_piece_that_goes_on_a_word_has_no_space(decoder):
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2, "c": 3}, unk_token="[UNK]"))
    tokenizer.decoder = decoder
    token_texts = TokenTexts(PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]"))
    assert [token_texts.of(token).text for token in (1, 2, 3)] == [" a", "b", " c"]


def test_an_id_beyond_the_tokenizers_is_written_as_a_number(demo):
    assert TokenTexts(demo.tokenizer).of(10**6)[:2] == ("token_id:1000000", None)


def test_what_cannot_follow_has_openais_logprob(byte_tokenizer):
    token_texts, (x, y) = TokenTexts(byte_tokenizer), byte_tokenizer("xy")["input_ids"]
    never = float("-inf")
    [(entry, offset)] = token_texts.scored([y], [Logprob(-0.5, ((x, never),), 2)], offset=3)
    top = {"token": "x", "logprob": -9999.0, "bytes": [120]}
    assert (entry, offset) == ({"token": "y", "logprob": -0.5, "bytes": [121], "top_logprobs": [top]}, 5)
    asked = LensLayers(layers=(0, 3), points=(), top_k=1)
    [entry] = token_texts.lens([y], asked, [(LayerTokens(), LayerTokens(((x, never),), ((y, never, 2),)))])
    target = {"token": "y", "token_id": y, "bytes": [121], "logprob": -9999.0, "rank": 2}
    layers = [{"layer": 0, "top": []}, {"layer": 3, "top": [top | {"token_id": x}], "targets": [target]}]
    assert entry == {"token": "y", "token_id": y, "bytes": [121], "layers": layers}
