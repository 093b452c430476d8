"""Streams are read correctly, however their bytes are split."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.common.load import Exchange
from benchmarks.common.streams import gaps, pieces


def stream(texts: list[str]) -> str:
    events = [json.dumps({"choices": [{"index": 0, "text": text}]}, ensure_ascii=False) for text in texts]
    whole = "".join(f"data: {event}\n\n" for event in events) + "data: [DONE]\n\n"
    return whole.encode().decode("latin-1")


@given(st.lists(st.text(min_size=1), min_size=1), st.data())
def test_every_piece_of_text_is_found_when_its_event_is_whole(texts, data):
    whole = stream(texts)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(whole) - 1), max_size=8)))
    reads = [(float(i), whole[a:b]) for i, (a, b) in enumerate(zip([0, *cuts], [*cuts, len(whole)], strict=True))]
    found = list(pieces(Exchange(0.0, 200, reads)))
    assert [text for _, text in found] == texts
    assert [at for at, _ in found] == sorted(at for at, _ in found)


def test_tokens_that_come_in_one_read_come_at_once():
    exchange = Exchange(0.0, 200, [(1.0, stream(["ab"])), (2.0, stream(["cd"])), (4.0, stream(["e", "f"]))])
    seen = gaps([exchange], [["a", "b", "c", "d", "e", "f"]])
    assert (seen.median, seen.p99) == (1.5, 2.0)
    assert (seen.tokens, seen.most) == (2.0, 2)
    assert seen.events == pytest.approx(4 / 6)


def test_an_error_in_a_stream_is_not_taken_for_its_end():
    with pytest.raises(RuntimeError, match="overloaded"):
        list(pieces(Exchange(0.0, 200, [(0.0, 'data: {"error": {"message": "overloaded"}}\n\n')])))
