"""Chats are rendered by the model's template, and tool calls are returned in OpenAI's format."""

import copy
import json

import pytest

from deployments.chat.template import ChatFormat
from deployments.errors import RequestError
from deployments.messages import whole_calls

TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Work out an expression",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}, "digits": {"type": "integer"}},
        },
    },
}
QUESTION = {"role": "user", "content": "What is 12 * 7?"}
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12*7"}}\n</tool_call>'

# A call's text -> why it is none.
MALFORMED = {
    "<tool_call>\n{not json}\n</tool_call>": "no JSON",
    '<tool_call>\n{"name": "calculator", "arguments": \n</tool_call>': "cut JSON",
    "<tool_call></tool_call>": "nothing",
    "<tool_call>[1, 2]</tool_call>": "no object",
    "<tool_call>null</tool_call>": "null",
    '<tool_call>{"arguments": {}}</tool_call>': "no name",
    '<tool_call>{"name": 7, "arguments": {}}</tool_call>': "a name that is a number",
    f"<tool_call>{'[' * 5000}</tool_call>": "nesting without end",
}


@pytest.fixture(scope="module")
def chat(demo):
    return ChatFormat(demo.tokenizer, demo.hf)


@pytest.fixture(scope="module")
def prompt(chat):
    return chat.render([QUESTION], [TOOL])


def read(chat, prompt, pieces, streamed=False):
    """(content, [(name, arguments)], called) of an answer that comes in pieces."""
    reader = chat.reader(prompt, [TOOL], streamed=streamed)
    written = [*map(reader.add, pieces), reader.close()]
    calls = whole_calls(part for one in written for part in one.tool_calls)
    assert len({call.id for call in calls}) == len(calls)
    content = "".join(part.content for part in written)
    return content, [(call.name, call.arguments) for call in calls], reader.called


def test_a_chat_with_tools_names_them_and_ends_where_the_answer_begins(chat, prompt, demo):
    assert "calculator" in prompt
    assert QUESTION["content"] in prompt
    assert prompt.endswith(chat.render([QUESTION], None)[-10:])
    assert "calculator" not in chat.render([QUESTION], None)
    ids = chat.tokenize(prompt).ids
    assert demo.tokenizer.decode(ids) == prompt  # no special token is added to those of the template
    assert not set(ids) & {demo.tokenizer.eos_token_id} or demo.tokenizer.eos_token in prompt


def test_earlier_calls_render_the_same_from_json_text_as_from_an_object(chat):
    def history(arguments):
        call = {"id": "call_1", "type": "function", "function": {"name": "calculator", "arguments": arguments}}
        return [
            QUESTION,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "84"},
        ]

    arguments = {"expression": "12*7"}
    sent = history(json.dumps(arguments))
    assert chat.render(sent, [TOOL]) == chat.render(history(arguments), [TOOL])
    assert "12*7" in chat.render(sent, [TOOL])
    assert sent == history(json.dumps(arguments))  # the caller's messages are left as they were


def test_arguments_that_are_no_object_are_rendered_as_they_are_and_none_as_an_empty_one(chat):
    def told(arguments):
        call = {"id": "1", "type": "function", "function": {"name": "calculator", "arguments": arguments}}
        return chat.render([QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}], [TOOL])

    assert "12*" in told("12*")
    assert "[1, 2]" in told("[1, 2]")
    assert {told(none) for none in ("", " ", "null")} == {told("{}")}


def test_a_template_of_lists_of_parts_shows_texts(tiny, byte_tokenizer):
    tokenizer = copy.deepcopy(byte_tokenizer)
    tokenizer.chat_template = (
        "{% for message in messages %}{% for part in message.content or [] %}"
        "{% if part.type == 'text' %}{{ part.text }}.{% endif %}{% endfor %}{% endfor %}"
    )
    messages = [{"role": "system", "content": "Be brief"}, QUESTION, {"role": "assistant", "content": None}]
    assert ChatFormat(tokenizer, tiny("llama").hf).render(messages, None) == "Be brief.What is 12 * 7?."


def test_an_earlier_answer_renders_as_the_model_wrote_it(chat, prompt):
    call = {"type": "function", "function": {"name": "calculator", "arguments": '{"expression": "12*7"}'}}
    told = chat.render([QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}], [TOOL])
    assert told.startswith(prompt + CALL)


def test_a_model_without_a_template_refuses_chats_and_tools(tiny):
    model = tiny("llama")
    chat = ChatFormat(model.tokenizer, model.hf)
    for field, ask in (("messages", lambda: chat.render([QUESTION], None)), ("tools", lambda: chat.reader("", [TOOL]))):
        with pytest.raises(RequestError) as refused:
            ask()
        assert refused.value.field == field


def test_what_a_template_cannot_render_is_refused_by_field(tiny, byte_tokenizer):
    tokenizer = copy.deepcopy(byte_tokenizer)
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(RequestError, match="roles must alternate") as refused:
        ChatFormat(tokenizer, tiny("llama").hf).render([QUESTION], None)
    assert refused.value.field == "messages"


def test_a_call_without_arguments_has_none(chat, prompt):
    assert read(chat, prompt, ['<tool_call>{"name": "calculator"}</tool_call>'])[1] == [("calculator", "{}")]


def test_arguments_are_the_text_that_the_model_wrote(chat, prompt):
    written = '{"expression" : "1\\/3",  "digits":"2"}'
    answer = f'<tool_call>{{"name": "calculator", "arguments": {written}}}</tool_call>'
    assert read(chat, prompt, [answer])[1] == [("calculator", written)]


@pytest.mark.parametrize("call", MALFORMED, ids=MALFORMED.values())
def test_a_malformed_call_is_content_and_what_follows_is_read_on(call, chat, prompt):
    content, calls, called = read(chat, prompt, [f"Well. {call} So: {CALL}"])
    assert content.split() == f"Well. {call} So:".split()
    assert calls == [("calculator", '{"expression": "12*7"}')]
    assert called
