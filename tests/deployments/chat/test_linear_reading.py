"""Reading an answer takes time in proportion to its length, whatever a model writes."""

from __future__ import annotations

import asyncio
import copy
import functools
import json
import logging
from types import SimpleNamespace

import pytest
import re2
from hypothesis import given
from hypothesis import strategies as st
from transformers.cli.serving.utils import _RESPONSE_TEMPLATE_FALLBACKS
from transformers.utils.chat_parsing.response_templates import load_response_template

from deployments.chat import response_templates
from deployments.chat.call_values import parsed
from deployments.chat.marks import MAX_MARK, begun_answer
from deployments.chat.reader import AnswerReader
from deployments.chat.template import ChatFormat
from deployments.engine.decoding.text import MOST_WAITING, TextStream
from deployments.engine.request import Delta, Finished, Request
from deployments.errors import RequestError
from deployments.job import Job
from deployments.messages import Piece, whole_calls
from deployments.replica.delivery import SLICE, Delivery, RunningChoice

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"type": "integer"}}}}}]
OURS = {
    "hermes": response_templates.HERMES,
    "list": response_templates.MISTRAL,
    "named": response_templates.MISTRAL_NAMED,
    "llama": response_templates.LLAMA,
}
THINKING = {"open": "<think>", "close": "</think>"}
TEMPLATES = {
    name: {
        "start_anchor": response_templates.ANCHORS,
        "fields": {"thinking": THINKING, "tool_calls": form, "content": {}},
    }
    for name, form in OURS.items()
} | dict(zip(["qwen", "tagged", "gemma"], _RESPONSE_TEMPLATE_FALLBACKS.values(), strict=True))
CALLS = {
    "hermes": '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>',
    "list": '[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}]',
    "named": '[TOOL_CALLS]f[ARGS]{"x": 1}',
    "llama": '{"name": "f", "parameters": {"x": 1}}; ',
    "qwen": '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>',
    "tagged": "<tool_call><function=f><parameter=x> 1 </parameter></function></tool_call>",
    "gemma": '<|tool_call>call:f{x:1,y:<|"|>a: {"b"<|"|>}<tool_call|>',
}
# What is repeated, of marks that could begin again and again.
FLOODS = [" ", " \n\t", "<", "[", "{", '{"name" ', "<tool_call>", "<tool_call> <function=f", "</", "[TOOL_CALLS]", ";"]
FLOODS += ["<|tool_call>call:", '<tool_call>{"name": "', "[TOOL_CALLS][{", "<parameter=x>", '<|"|>', "<think> "]


@functools.cache
def template(name):
    known = response_templates._linear(load_response_template(TEMPLATES[name]))
    assert set(known.fields) == set(TEMPLATES[name]["fields"])
    return known


def read(name, pieces, streamed=True):
    """(content, [(name, arguments)], thoughts) of an answer that comes in pieces."""
    reader = AnswerReader(template(name), "", TOOLS, streamed=streamed)
    written = [*map(reader.add, pieces), reader.close()]
    calls = whole_calls(part for one in written for part in one.tool_calls)
    content, thoughts = ("".join(parts) for parts in zip(*((p.content, p.reasoning) for p in written), strict=True))
    return content, [(call.name, call.arguments) for call in calls], thoughts


@pytest.fixture
def searched(monkeypatch):
    """Counts the characters that RE2 was given."""
    given, match = [0], re2._Regexp._match

    def counted(self, anchor, text, *more):
        for found in match(self, anchor, text, *more):
            given[0] += len(text)
            yield found
        given[0] += len(text)

    monkeypatch.setattr(re2._Regexp, "_match", counted)
    return given


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("flood", FLOODS)
def test_twice_the_text_takes_twice_the_searching(name, flood, searched):
    reader, text, work = AnswerReader(template(name), "", TOOLS, streamed=True), (flood * 1024)[:1024], []
    for half in (text[:512], text[512:]):
        for character in half:
            reader.add(character)
        so_far = searched[0]
        copy.deepcopy(reader).close()  # the reader itself goes on behind the first half
        work.append(searched[0])
        searched[0] = so_far
    assert work[1] <= 2.2 * work[0] + 8 * MAX_MARK
    assert work[1] <= 1024 * 4 * MAX_MARK


def test_a_flood_of_whitespace_before_a_call_is_searched_once_and_belongs_to_the_call(searched):
    content, calls, _ = read("hermes", " " * 16_000 + CALLS["hermes"])
    assert (content, calls) == ("", [("f", '{"x": 1}')])
    assert searched[0] < 64 * 16_000


def test_a_mark_longer_than_any_is_content():
    text = "[TOOL_CALLS]" + "f" * MAX_MARK + '[ARGS]{"x": 1}'
    assert read("named", text) == read("named", [text]) == (text, [], "")


@pytest.mark.parametrize("name", TEMPLATES)
@given(data=st.data())
def test_an_answer_in_any_pieces_reads_as_the_whole(name, data):
    parts = st.sampled_from(
        [CALLS[name], *FLOODS, " " * MAX_MARK, "x" * MAX_MARK, "é", "</tool_call>", "}", "</think>"]
    )
    text = "".join(data.draw(st.lists(parts, max_size=7)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    streamed = data.draw(st.booleans())
    assert read(name, [text], streamed) == read(name, pieces, streamed) == read(name, text, streamed)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_call_of_every_known_template_is_read(name):
    content, calls, _ = read(name, CALLS[name].rstrip("; "))
    assert content == ""
    assert [(called, json.loads(arguments)["x"]) for called, arguments in calls] == [("f", 1)]


# ---- what RE2 cannot express


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("tool_calls", {"open_pattern": r"(?P<mark><+)call(?P=mark)"}),
        ("tool_calls", {"open_pattern": r"(?<=\n)<call>"}),
        ("tool_calls", {"open_pattern": r"\b<call>"}),
        ("tool_calls", {"open_pattern": r"\s*"}),
        ("tool_calls", {"open_pattern": "(?i)<call>"}),
        ("tool_calls", {"open_pattern": "(?=<call>)", "close_pattern": "(?=<call>)"}),
        ("tool_calls", {"open": "<call>", "content": "kv-lines"}),
        ("tool_calls", {"open": "<a>", "content": "xml-inline", "content_args": {"tag_pattern": r"<(?P<key>a)\1>"}}),
        ("thinking", {"open_pattern": "(?<!x)<think>", "close": "</think>"}),
    ],
)
def test_a_field_that_cannot_be_read_in_linear_time_is_left_out_and_the_log_says_why(field, change, caplog):
    call = {"transform": {"type": "function", "function": "{content}"}} if field == "tool_calls" else {}
    known = load_response_template({"start_anchor": "assistant:", "fields": {field: change | call, "content": {}}})
    with caplog.at_level(logging.WARNING, "ray.serve"):
        assert set(response_templates._linear(known).fields) == {"content"}
    assert f"the field {field} of the model's response template is left out: " in caplog.text


def test_a_model_whose_calls_cannot_be_read_in_linear_time_refuses_tools(tiny, monkeypatch):
    model = tiny("llama")
    form = response_templates.HERMES | {"open_pattern": r"(?<!\\)<tool_call>"}
    own = {"start_anchor": "assistant:", "fields": {"tool_calls": form, "content": {}}}
    monkeypatch.setattr(model.tokenizer, "response_template", own, raising=False)
    with pytest.raises(RequestError) as refused:
        ChatFormat(model.tokenizer, model.hf).reader("", TOOLS)
    assert refused.value.field == "tools"


def test_a_template_whose_anchor_cannot_be_found_in_linear_time_is_left_out():
    known = load_response_template({"start_anchor_pattern": r"(?<=\n)assistant:", "fields": {"content": {}}})
    assert response_templates._linear(known) is None


# ---- beside the marks


def test_the_beginning_of_an_answer_is_found_in_one_search(searched):
    prompt = "<|im_start|>assistant\n" * 500
    assert begun_answer(template("qwen"), prompt + "<think>") == "<think>"
    assert searched[0] <= 2 * (len(prompt) + 100)
    assert begun_answer(template("qwen"), "no anchor") == ""


@pytest.mark.parametrize("text", ['<|"|>' * 4001, "<parameter=x>" + " " * 8000, "<parameter=x>" * 2000])
def test_arguments_that_never_end_are_searched_once(text, searched):
    contents = [
        ("json", {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>'], ["<<", ">>"]], "allow_non_json": True}),
        ("xml-inline", TEMPLATES["tagged"]["fields"]["tool_calls"]["content_args"]),
    ]
    for content, args in contents:
        parsed(text, content, args)
    assert searched[0] <= 4 * len(text)


def test_a_call_has_a_bounded_number_of_arguments():
    call = CALLS["tagged"].replace("<parameter=x> 1 </parameter>", "<parameter=x> 1 </parameter>" * 257)
    assert read("tagged", [call]) == (call, [], "")


@pytest.fixture
def ended(byte_tokenizer):
    """A tokenizer of bytes, and the id of its special token."""
    backend = byte_tokenizer.backend_tokenizer
    copy = type(byte_tokenizer)(tokenizer_object=backend.from_str(backend.to_str()), eos_token="<end>")
    return copy, copy.eos_token_id


@pytest.mark.parametrize("kind", ["half a character", "special"])
def test_tokens_that_are_no_text_are_not_decoded_again_and_again(ended, kind):
    """The tokenizer's stream decodes all that it holds back with each token: it must not hold back much."""
    tokenizer, end = ended
    token = tokenizer("\u4eac")["input_ids"][0] if kind == "half a character" else end
    text, told = TextStream(tokenizer), []
    for number in range(500):
        told.append(text.add(token))
        assert len(text._waiting) < MOST_WAITING, number
    told.append(text.close([token] * 500))
    assert "".join(told) == tokenizer.decode([token] * 500, skip_special_tokens=True)


def test_text_behind_tokens_that_are_no_text_comes_whole(ended):
    tokenizer, end = ended
    tokens = [*tokenizer("a")["input_ids"], *[end] * 40, *tokenizer(" \u4eac")["input_ids"]]
    text = TextStream(tokenizer)
    assert "".join(map(text.add, tokens)) + text.close(tokens) == "a \u4eac"


def test_others_events_go_on_while_a_whole_answer_is_read():
    async def run():
        request = Request("flood", [1], max_tokens=1)
        choice = RunningChoice(request, Piece(0), AnswerReader(template("llama"), "", TOOLS))
        engine = SimpleNamespace(submit=lambda request: None)
        delivery = Delivery(engine, token_texts=None)
        ticket = delivery.open(Job("job"), {"flood": choice})
        rest = Delta("flood", (1,), " " * 40 * SLICE)
        delivery.deliver([Finished("flood", "length", [1], [1], rest=rest)])
        turns = 0
        while ticket.messages.empty():
            await asyncio.sleep(0)
            turns += 1
        return turns, await ticket.messages.get()

    turns, piece = asyncio.run(run())
    assert turns >= 40
    assert piece.text == " " * 40 * SLICE
