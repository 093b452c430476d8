"""The one definition of choices of tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from deployments.errors import RequestError
from deployments.points.placement import Layout, placed
from deployments.points.token_choices import (
    TextPiece,
    TokenChoice,
    as_json,
    parse,
    resolve,
    resolve_ahead,
)

CHOICE = TypeAdapter(TokenChoice)
PROMPT, TOTAL = 5, 8


@pytest.mark.parametrize(
    ("choice", "positions"),
    [
        ("all", range(8)),
        ("prompt", range(5)),
        ("generated", range(5, 8)),
        ("last", [7]),
        ("prompt_last", [4]),
        ("generated_last", [7]),
        ({"last": 2}, [6, 7]),
        ({"prompt_last": 2}, [3, 4]),
        ({"positions": [6, 0, 6]}, [0, 6]),
        ({"positions": [3, 2]}, [2, 3]),
        ({"from": 2, "to": 5}, [2, 3, 4]),
        ({"from": 2, "to": 9}, range(2, 8)),
        ({"from": 1}, range(1, 8)),
    ],
)
def test_each_choice_means_these_tokens(choice, positions):
    assert [*resolve(CHOICE.validate_python(choice), PROMPT, "tokens").of(TOTAL)] == [*positions]


@pytest.mark.parametrize("window", [{"from": 5, "to": 5}, {"from": -1, "to": 2}, {"from": 0, "to": 65537}, {"to": 3}])
def test_a_window_that_holds_no_token_or_too_many_is_refused(window):
    with pytest.raises(ValidationError):
        CHOICE.validate_python(window)


def test_where_nothing_is_generated_the_last_of_all_is_the_prompts_and_of_the_answer_there_is_none():
    assert [*resolve("last", PROMPT, "tokens").of(PROMPT)] == [4]
    assert not resolve("generated_last", PROMPT, "tokens").of(PROMPT)


@given(st.lists(st.integers(0, 20), min_size=1), st.integers(0, 20), st.integers(0, 20))
def test_within_is_those_between(positions, start, stop):
    tokens = resolve(CHOICE.validate_python({"positions": positions}), 3, "tokens")
    assert [*tokens.within(start, stop)] == sorted({at for at in positions if start <= at < stop})


@pytest.mark.parametrize(
    ("piece", "positions"),
    [
        (TextPiece(text="France"), [4, 5]),
        (TextPiece(text="France", which="first"), [1, 2]),
        (TextPiece(text="France", which="all"), [1, 2, 4, 5]),
        (TextPiece(text="an"), [4, 5]),
    ],
)
def test_a_piece_of_text_is_the_tokens_that_have_its_characters(piece, positions):
    tokens = ["<s>", "Fra", "nce", " and ", "Fra", "nce"]
    ends = [0]
    for token in tokens:
        ends.append(ends[-1] + len(token))
    assert placed(piece, Layout(lambda: ("".join(tokens), ends)), "tokens").positions == positions


def test_every_match_of_a_text_is_found_as_one_by_one():
    text, ends = "ab" * 50, [0, 1, 1, 2, *range(3, 101)]  # of which one token adds no character
    found = placed(TextPiece(text="ba", which="all"), Layout(lambda: (text, ends)), "tokens").positions
    spans = [(begin, begin + 2) for begin in range(1, 98, 2)]
    tokens = enumerate(zip(ends, ends[1:], strict=False))
    assert found == [i for i, (first, end) in tokens if any(first < stop and end > begin for begin, stop in spans)]


@pytest.mark.parametrize("choice", ["generated", "generated_last"])
def test_generated_tokens_are_refused_where_none_are(choice):
    with pytest.raises(RequestError, match="no token is generated"):
        resolve_ahead(choice, PROMPT, PROMPT, "tokens")


def test_text_that_is_not_there_is_refused_by_its_field():
    with pytest.raises(RequestError, match="the prompt does not contain the text 'Spain'") as refused:
        placed(TextPiece(text="Spain"), Layout(lambda: ("France", [0, 6])), "capture.tokens")
    assert refused.value.field == "capture.tokens.text"


@pytest.mark.parametrize("value", ["first", [3], 3, {"first": 1}, {}])
def test_what_is_no_choice_is_refused_with_all_that_there_are(value):
    with pytest.raises(ValidationError) as refused:
        CHOICE.validate_python(value)
    (error,) = refused.value.errors()
    for form in ("prompt_last", '{"positions": [...]}', '{"text"'):
        assert form in error["msg"]


def test_commands_write_them_so():
    assert parse("prompt_last") == "prompt_last"
    assert parse("last:3").last == 3
    assert parse("positions:4,1").positions == [4, 1]
    assert as_json("from:0,to:64") == {"from": 0, "to": 64}
    assert as_json("from:1") == {"from": 1}
    assert parse("text:the end") == TextPiece(text="the end")
    for wrong in ("first", "last:x", "positions:1,x", "from:x", "from:3,to:3", "text:"):
        with pytest.raises(ValueError, match="prompt_last:K"):
            parse(wrong)
