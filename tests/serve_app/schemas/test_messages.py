"""Messages as clients send them back: what the chat template gets of them."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
from openai.types import chat
from pydantic import ValidationError

from deployments.chat.template import ChatFormat
from serve_app.schemas.messages import ChatMessage, TextPart

CALL = {"id": "1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
TOLD = "{% if message.tool_calls %}{{ message.tool_calls[0].function.name }}{% endif %}|{% endfor %}"
TEMPLATES = {
    "joins": "{% for message in messages %}{{ message.role + ':' + message['content'] }}" + TOLD,
    "prints": "{% for message in messages %}{{ message.role }}:{{ message.content }}" + TOLD,
    # As DeepSeek's: calls without content, or content without calls.
    "tests": "{% for message in messages %}{{ message.role }}:{% if message['content'] is none %}"
    "{{ message.tool_calls[0].function.name }}{% else %}{{ message['content'] }}{% endif %}|{% endfor %}",
}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("sent", [{}, {"content": None}, {"content": ""}, {"content": []}])
def test_a_message_with_calls_and_no_text_is_one_with_an_empty_text(sent, template, tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = template
    messages = [
        {"role": "user", "content": "When?"},
        {"role": "assistant", "tool_calls": [CALL]} | sent,
        {"role": "tool", "content": "noon", "tool_call_id": "1"},
    ]
    form = ChatFormat(tokenizer, SimpleNamespace(config=SimpleNamespace(model_type="none")))
    prompt = form.render([ChatMessage.model_validate(message).spoken for message in messages], None)
    assert prompt == "user:When?|assistant:clock|tool:noon|"


@pytest.mark.parametrize(
    "sent",
    [{"refusal": "No."}, {"content": None, "refusal": "No."}, {"content": [{"type": "refusal", "refusal": "No."}]}],
)
def test_a_refusal_is_the_assistants_text(sent):
    assert ChatMessage.model_validate({"role": "assistant"} | sent).spoken == {"role": "assistant", "content": "No."}
    with pytest.raises(ValidationError, match="content is missing"):
        ChatMessage.model_validate({"role": "user", "refusal": "No."})


@pytest.mark.parametrize("role", ["System", "Developer", "User", "Assistant", "Tool"])
def test_every_field_of_openais_messages_is_known(role):
    sent = getattr(chat, f"ChatCompletion{role}MessageParam").__annotations__
    added = {"provider_specific_fields"}  # by litellm
    assert set(sent) | added <= set(ChatMessage.model_fields)
    assert set(chat.ChatCompletionContentPartTextParam.__annotations__) <= set(TextPart.model_fields)
