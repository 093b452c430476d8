"""Messages are found in the prompts of many families' templates, and reasoning in answers as it is generated."""

import copy
from itertools import compress
from types import SimpleNamespace

import pytest

from deployments.chat import roles
from deployments.chat.template import ChatFormat
from deployments.points.placement import Layout, Turns
from deployments.points.token_choices import ROLES, Spoken, Tokens, parse

CALL = {"id": "call12345", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TOOL = {"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}
CHAT = [
    {"role": "system", "content": "Be brief"},
    {"role": "user", "content": " Hi\n"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello"},
    {"role": "user", "content": "Add"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call12345", "content": '{"sum": 1}'},
    {"role": "assistant", "content": "It is 1", "reasoning_content": "so"},
    {"role": "user", "content": "Hi"},
]
TEXT = "{{ m.content }}"
CALLS = "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
EACH, END = "{% for m in messages %}", "{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CHATML = "<|im_start|>{{ m.role }}\n" + TEXT + CALLS + "<|im_end|>\n"
LAST = "{{ m.content.split('</think>')[-1].lstrip('\n') }}"
# Family -> its template, abridged, and what it shows otherwise than ChatML: by the message's number.
FAMILIES = {
    "SmolLM 2": (EACH + CHATML + END + PROMPT, {1: " Hi\n", 2: "<think>\nhm\n</think>\n\nHello"}),
    "Qwen 3": (
        "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are Qwen<|im_end|>\n{% endif %}" + EACH
        + "<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n{% if m.reasoning_content %}<think>\n"
        "{{ m.reasoning_content.strip('\n') }}\n</think>\n\n{% endif %}" + LAST + CALLS + "<|im_end|>\n" + END + PROMPT
        + "{% if add_generation_prompt %}<think>\n\n</think>\n\n{% endif %}",  # where calls do not begin
        {1: " Hi\n", 6: "<think>\nso\n</think>\n\nIt is 1"},
    ),
    "Llama 3": (
        "{{ bos_token }}" + EACH + "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{% if m.tool_calls %}"
        '{"name": "add", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
        "{% elif m.role == 'tool' %}{{ m.content | tojson }}{% else %}{{ m.content | trim }}{% endif %}<|eot_id|>"
        + END + "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
        {2: "<think>\nhm\n</think>\n\nHello", 4: '{"name": "add", "parameters": {"a": 1}}', 5: '{\\"sum\\": 1}'},
    ),
    "Gemma": (
        "{% set first = messages[0].content + '\n\n' %}{% for m in messages[1:] %}<start_of_turn>"
        "{{ 'model' if m.role == 'assistant' else 'user' }}\n{{ first if loop.first }}{{ m.content | trim }}" + CALLS
        + "<end_of_turn>\n" + END + "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
        {2: "<think>\nhm\n</think>\n\nHello"},
    ),
    "Mistral": (
        "{{ bos_token }}{% for m in messages[1:] %}{% if m.role == 'user' %}[INST] "
        "{{ messages[0].content + '\n\n' if loop.last }}{{ m.content }}[/INST]{% elif m.role == 'tool' %}[TOOL_RESULTS]"
        "{{ m.content }}[/TOOL_RESULTS]{% elif m.tool_calls %}[TOOL_CALLS] [{{ m.tool_calls[0].function | tojson }}]"
        "{{ eos_token }}{% else %}" + TEXT + "{{ eos_token }}{% endif %}" + END,
        {1: " Hi\n", 2: "<think>\nhm\n</think>\n\nHello", 4: '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]'},
    ),
    "marked": (
        EACH + "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}" + LAST + CALLS
        + "<|im_end|>{% endgeneration %}\n{% else %}" + TEXT + "<|im_end|>\n{% endif %}" + END + PROMPT,
        {1: " Hi\n", 2: "Hello<|im_end|>", 4: "<tool_call>{}</tool_call><|im_end|>", 6: "It is 1<|im_end|>"},
    ),
}  # fmt: skip


def format_of(demo, template):
    tokenizer = copy.deepcopy(demo.tokenizer)
    tokenizer.chat_template, tokenizer.response_template = template, None
    hf = SimpleNamespace(config=SimpleNamespace(model_type="other"), generation_config=demo.hf.generation_config)
    return ChatFormat(tokenizer, hf)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_message_is_found_where_its_text_is(demo, family):
    template, other = FAMILIES[family]
    chat = format_of(demo, template)
    text = chat.render(CHAT, [TOOL])
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    want = {i: str(message["content"]).strip() for i, message in enumerate(CHAT)} | {2: "Hello", 4: call} | other
    want = {i: of.replace("{}", call[11:-12]) for i, of in want.items()}
    found = chat.spans(text, CHAT, [TOOL])
    assert {span.message: text[span.start : span.stop] for span in found if not span.is_reasoning} == want
    reasons = {span.message: text[span.start : span.stop] for span in found if span.is_reasoning}
    assert reasons == ({6: "<think>\nso\n</think>"} if family == "Qwen 3" else {})


def test_a_prompt_that_does_not_show_its_messages_has_no_roles(demo):
    for template in ("{{ messages[0].content | upper }}{{ messages | length }}", EACH + TEXT + TEXT + END):
        chat = format_of(demo, template)
        assert chat.spans(chat.render(CHAT, None), CHAT, None) is None


def test_a_token_belongs_to_a_message_if_it_has_any_character_of_it():
    found = [roles.Span(3, 8, 0), roles.Span(9, 12, 1), roles.Span(9, 10, 1, True)]
    # A token at the border, two of one character, one whose offsets lack its space, and one beyond.
    turns = roles.turns(CHAT[1:3], found, [(0, 2), (2, 5), (5, 6), (5, 6), (7, 9), (9, 10), (10, 12), (12, 14)], True)
    assert [ROLES[role] for role in turns.roles] == [
        *("template", "user", "user", "user", "user", "reasoning", "assistant", "template")
    ]
    assert turns.turns == [-1, 0, 0, 0, 0, 1, 1, -1]
    assert turns.chosen(parse("turn:-1")) == ([], True)
    assert turns.chosen(parse("turn:-2")) == turns.chosen(parse("role:assistant:0")) == ([5, 6], False)
    assert turns.chosen(parse("role:assistant")) == ([5, 6], True)
    assert turns.chosen("answer") == ([6], True)
    assert turns.chosen(parse("turn:3")) == ([], False)


def test_reasoning_is_known_token_by_token_and_has_its_marks(demo):
    chat = format_of(demo, FAMILIES["Qwen 3"][0])
    words = ["<think>", "so", "</th", "ink>", "\n\n", "a <", " b", "<thi", "nk>", "c"]
    for prompt, first in (("<|im_start|>assistant\n", 0), ("<|im_start|>assistant\n<think>\n", 1)):
        answer = map(chat.is_reasoning(prompt, words.__getitem__), range(first, len(words)))
        assert [*compress(words[first:], answer)] == [*words[first:4], "nk>", "c"]
    assert format_of(demo, FAMILIES["Llama 3"][0]).is_reasoning("", words.__getitem__) is None


def test_an_answer_continues_tokens_of_the_prompt():
    turns = Turns([1, 4, 2, 2, 4, 2], [0, -1, 1, 1, -1, 2], ("user", "assistant", "assistant"))
    tokens = Layout(lambda: ("", []), 6, True, lambda: turns).spoken(Spoken(role="assistant"), "tokens")
    assert [*tokens.of(9)] == [2, 3, 5, 6, 7, 8]
    assert [*tokens.within(3, 7)] == [3, 5, 6]
    assert [tokens.turn(position) for position in (2, 5, 8)] == [0, 2, 5]
    assert Layout(lambda: ("", []), 6, True, lambda: turns).spoken(Spoken(turn=-1), "tokens") == Tokens(5)
