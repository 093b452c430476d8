"""An echoed prompt is the text that was sent, and its token offsets are right."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, processors
from transformers import PreTrainedTokenizerFast

from deployments.chat.prompts import Prompts
from deployments.chat.token_texts import TokenTexts
from deployments.job import Job

TEXTS = ["Tom has 3 boxes.", "", "  two spaces", "Ünï 北京 🧮", "so <|im_end|> it is"]


def opening_tokenizer():
    """Like Llama 2's: an opening token, and a space before the text, are put before every text."""
    characters = "▁abcdefghijklmnopqrstuvwxyzT0123456789.<>/"
    vocabulary = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]
    vocabulary += [(f"<0x{byte:02X}>", -9.0) for byte in range(256)] + [(c, -3.0) for c in characters]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    replace, strip = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse(), strip])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def prompts_of(tokenizer, chat=None):
    model = SimpleNamespace(tokenizer=tokenizer, context=1000, longest_token=10, vocabulary=len(tokenizer))
    return Prompts(model, chat, TokenTexts(tokenizer))


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", ["demo", "bytes", "opening"])
def test_a_text_is_repeated_as_it_was_sent_and_its_tokens_cut_it(name, text, demo, byte_tokenizer):
    tokenizer = {"demo": demo.tokenizer, "bytes": byte_tokenizer, "opening": opening_tokenizer()}[name]
    prompts, token_texts = prompts_of(tokenizer), TokenTexts(tokenizer)
    (prompt,) = prompts.of(Job("", prompts=[text]))
    echo = prompts.echo(prompt)
    assert echo.text == text
    ends = [*echo.offsets[1:], len(text)]
    for token, begin, end in zip(prompt.ids, echo.offsets, ends, strict=False):
        assert begin <= end
        shown = token_texts.of(token).text
        if begin > 0 and "\\x" not in shown:
            assert text[begin:end] == shown
    if prompt.ids:
        assert echo.offsets[0] == 0


def test_bytes_that_are_no_character_are_repeated_too(byte_tokenizer):
    prompts = prompts_of(byte_tokenizer)
    (prompt,) = prompts.of(Job("", prompts=[byte_tokenizer("€")["input_ids"][:2] + byte_tokenizer("a")["input_ids"]]))
    echo = prompts.echo(prompt)
    assert echo.text.endswith("a")
    assert "\ufffd" in echo.text
    assert list(echo.offsets) == sorted(echo.offsets)


def test_a_part_of_a_text_has_only_its_own_spaces(demo):
    opening = opening_tokenizer()
    for text, tokens in (("a b", ["a", "▁", "b"]), (" a", ["▁", "a"]), ("", [])):
        assert opening.convert_ids_to_tokens(prompts_of(opening).inner_ids(text)) == tokens
        assert prompts_of(demo.tokenizer).inner_ids(text) == demo.tokenizer(text)["input_ids"]
