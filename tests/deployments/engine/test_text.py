"""Text is streamed in whole characters, without any part of a stop string."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from deployments.engine.decoding.text import TextStream


def stream(tokenizer, tokens, stop=(), min_tokens=0, before=None):
    """(text, chunks, stopped) of tokens added one at a time until a stop string."""
    text = TextStream(tokenizer, stop, before=before)
    chunks, read = [], []
    for token in tokens:
        read.append(token)
        chunks.append(text.add(token, may_stop=len(read) >= min_tokens))
        if text.stopped:
            break
    chunks.append(text.close(read))
    return "".join(chunks), chunks, text.stopped


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@given(st.text(max_size=20))
@example("naïve — 北京 👩‍👩‍👧 ok")
def test_any_text_comes_back_in_whole_characters(byte_tokenizer, text):
    back, chunks, _ = stream(byte_tokenizer, encode(byte_tokenizer, text))
    assert back == text
    for chunk in chunks:
        chunk.encode()  # a torn character would not encode, or be a replacement character
        assert "\ufffd" not in chunk or "\ufffd" in text


@given(st.lists(st.integers(0, 255), max_size=24))
def test_bytes_that_are_no_text_come_as_the_tokenizer_decodes_them(byte_tokenizer, tokens):
    back, _, _ = stream(byte_tokenizer, tokens)
    assert back == byte_tokenizer.decode(tokens)


@given(st.lists(st.integers(0, 1 << 20), max_size=24))
def test_any_tokens_of_the_model_that_ships_come_as_its_tokenizer_decodes_them(demo, numbers):
    tokens = [number % len(demo.tokenizer) for number in numbers]
    back, _, _ = stream(demo.tokenizer, tokens)
    assert back == demo.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@pytest.fixture(scope="module")
def fallback_tokenizer():
    """Bytes are tokens where a character is none, as in Llama 2, Mistral and Gemma."""
    chunks = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"abc▁"]
    model = models.BPE({chunk: i for i, chunk in enumerate(chunks)}, [], unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    replace, strip = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse(), strip])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@given(tokens=st.lists(st.integers(1, 260), max_size=24))
@example(tokens=[1 + 0x1F, 1 + 0xFC, 259, 257])
def test_bytes_that_are_no_text_end_no_stream(fallback_tokenizer, tokens):
    back, _, _ = stream(fallback_tokenizer, tokens)
    letters = [token for token in tokens if token > 256]
    kept = "".join(char for char in back if char in "abc ")
    assert len(kept) >= sum(letter != 260 for letter in letters)  # only a space at the beginning is dropped


EURO = [1 + byte for byte in "€".encode()]  # of the tokenizer above


@given(
    prompt=st.lists(st.integers(257, 260), min_size=1, max_size=3),
    parts=st.lists(st.sampled_from([[257], [258], [260], EURO]), max_size=8),
    cut=st.integers(0, 2),
)
def test_a_continuation_joins_to_its_prompt(fallback_tokenizer, prompt, parts, cut):
    tokens = [*(token for part in parts for token in part), 259, *EURO[:cut]]
    back, _, _ = stream(fallback_tokenizer, tokens, before=prompt[-1])
    assert fallback_tokenizer.decode(prompt) + back == fallback_tokenizer.decode(prompt + tokens)


def test_a_continuation_shows_no_part_of_a_prompts_unfinished_character(fallback_tokenizer):
    assert stream(fallback_tokenizer, [257, 260, 258], before=EURO[0])[0] == "a b"


def test_a_character_waits_for_its_last_byte(byte_tokenizer):
    text = TextStream(byte_tokenizer)
    assert [text.add(token) for token in encode(byte_tokenizer, "a€b")] == ["a", "", "", "€", "b"]


def until_stop(texts: list[str], stops: list[str], min_tokens: int = 0) -> str | None:
    """The text before the stop string that is complete first, the earliest where several end together.

    Args:
        texts: What each token adds.
        stops: Stop strings.
        min_tokens: Before so many tokens none ends the text.
    """
    text = ""
    for count, added in enumerate(texts, 1):
        for character in added:
            text += character
            starts = [len(text) - len(stop) for stop in stops if text.endswith(stop)]
            if starts and count >= min_tokens:
                return text[: min(starts)]
    return None


some_stops = st.lists(st.text("ab€", min_size=1, max_size=4), min_size=1, max_size=3)


@given(st.text("ab€", max_size=14), some_stops, st.integers(0, 14))
@example("xabc", ["abcd", "bc"], 4)
@example("aaa", ["aa"], 3)
def test_text_ends_before_the_first_stop_string_and_shows_no_chunk_of_it(byte_tokenizer, text, stops, min_tokens):
    tokens = encode(byte_tokenizer, text)
    back, chunks, stopped = stream(byte_tokenizer, tokens, tuple(stops), min_tokens)
    _, texts, _ = stream(byte_tokenizer, tokens)
    want = until_stop(texts[:-1], stops, min_tokens)
    assert stopped == (want is not None)
    assert back == (text if want is None else want)
    assert not any("\ufffd" in chunk for chunk in chunks)


@given(
    st.lists(st.integers(0, 255), max_size=24), st.lists(st.text('!"#$%\ufffdé', min_size=1, max_size=3), max_size=3)
)
def test_bytes_that_are_no_text_end_before_a_stop_string_as_well(byte_tokenizer, tokens, stops):
    back, chunks, stopped = stream(byte_tokenizer, tokens, tuple(stops))
    whole = byte_tokenizer.decode(tokens)
    assert whole.startswith(back)
    assert not any(stop in back for stop in stops)
    assert stopped or back == whole
    assert "".join(chunks) == back


@given(
    st.lists(st.sampled_from(["Tom", " has", " 12", "\n", "#### ", "é", "北京"]), max_size=10),
    st.integers(0, 12),
    st.data(),
)
def test_which_stop_string_ends_a_text_does_not_hang_on_its_tokens(demo, words, min_tokens, data):
    tokens = encode(demo.tokenizer, "".join(words))
    text = demo.tokenizer.decode(tokens)
    chunks = st.integers(0, max(0, len(text) - 1)).flatmap(
        lambda start: st.integers(1, 5).map(lambda length: text[start : start + length] or "#")
    )
    stops = tuple(data.draw(st.lists(chunks, min_size=1, max_size=3)))
    back, _, stopped = stream(demo.tokenizer, tokens, stops, min_tokens)
    _, texts, _ = stream(demo.tokenizer, tokens)
    want = until_stop(texts[:-1], list(stops), min_tokens)
    assert stopped == (want is not None)
    assert back == (text if want is None else want)


def test_text_held_back_for_a_stop_string_comes_when_it_is_none(byte_tokenizer):
    text = TextStream(byte_tokenizer, ("STOP",))
    assert [text.add(token) for token in encode(byte_tokenizer, "aSTOx")] == ["a", "", "", "", "STOx"]


def test_special_tokens_are_no_text(demo):
    end = demo.tokenizer.eos_token_id
    tokens = [*encode(demo.tokenizer, "Tom"), end]
    assert stream(demo.tokenizer, tokens)[0] == "Tom"
