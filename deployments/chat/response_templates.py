"""Formats of reasoning and tool calls, as response templates in transformers' schema language."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from transformers.cli.serving.utils import get_response_template
from transformers.utils.chat_parsing.response_templates import (
    ResponseTemplate,
    ResponseTemplateField,
    load_response_template,
)

from deployments.chat import call_values, marks
from deployments.chat.mark_patterns import UnsupportedPattern

logger = logging.getLogger("ray.serve")

REASONING = ("reasoning_content", "thinking", "reasoning")  # names of the reasoning field in templates

CALL = {"type": "function", "function": "{content}"}
HERMES = {
    "open_pattern": r"\s*<tool_call>",
    "close": "</tool_call>",
    "repeats": True,
    "content": "json",
    "transform": CALL,
}
MISTRAL = {  # one list of all calls
    "open_pattern": r"\s*\[TOOL_CALLS\]",
    "content": "json",
    "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
    "transform_each": True,
}
MISTRAL_NAMED = {  # since tokenizer version 11: a marker before each name and each object
    "open_pattern": r"\s*\[TOOL_CALLS\]\s*(?P<name>[A-Za-z0-9_.-]+)(?:\[CALL_ID\][A-Za-z0-9]+)?\[ARGS\]",
    "close_pattern": r"(?=\[TOOL_CALLS\])",
    "repeats": True,
    "content": "json",
    "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
}
LLAMA = {  # the object alone is the call
    "open_pattern": r'\s*(?:<\|python_tag\|>\s*)?(?=\{\s*"name"\s*:)',
    "close_pattern": r'\s*;\s*(?=\{\s*"name"\s*:)',
    "repeats": True,
    "content": "json",
    "transform": {"type": "function", "function": {"name": "{content.name}", "arguments": "{content.parameters}"}},
}

# Text that a chat template contains, text that it does not contain -> its format of calls.
CALLS: list[tuple[tuple[str, ...], tuple[str, ...], dict[str, Any]]] = [
    (("<tool_call>", "</tool_call>"), ("<function=", "<arg_key>"), HERMES),
    (("[TOOL_CALLS]", "[ARGS]"), (), MISTRAL_NAMED),
    (("[TOOL_CALLS]",), (), MISTRAL),
    (('"parameters": ', "<|start_header_id|>"), (), LLAMA),
]
REASONING_MARKS = [("<think>", "</think>"), ("[THINK]", "[/THINK]")]
ANCHORS = [  # text directly before an answer
    "<|im_start|>assistant\n",
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "[/INST]",
    "[/TOOL_RESULTS]",
    "<｜Assistant｜>",
    "<|assistant|>\n",
]


def response_template(tokenizer: Any, hf: Any) -> ResponseTemplate | None:
    """The format of a model's answers: the tokenizer's own, transformers', or one recognized by its chat template.

    Args:
        tokenizer: The model's tokenizer.
        hf: The model.

    Returns:
        None if none of them has one.
    """
    known = get_response_template(tokenizer, hf) or _shown(tokenizer.chat_template)
    return _linear(load_response_template(known)) if known else None


def with_hermes(template: ResponseTemplate | None) -> ResponseTemplate:
    """The format of a model's answers, None if nothing is known of it, with Hermes' form of calls."""
    calling = load_response_template(_declared({"tool_calls": HERMES}))
    return dataclasses.replace(template, fields=calling.fields | template.fields) if template else calling


def reasoning(template: ResponseTemplate) -> str | None:
    """The name of a template's reasoning field; None if it has none."""
    return next((name for name in REASONING if name in template.fields), None)


def markers(template: ResponseTemplate, tokenizer: Any, tools: bool) -> dict[int, str]:
    """Special tokens that a template depends on, which the text must contain: id -> text.

    Args:
        template: The format of a model's answers.
        tokenizer: The model's tokenizer.
        tools: Whether the request has tools.
    """
    patterns = [
        pattern.pattern.replace("\\", "")
        for name, field in template.fields.items()
        if tools or name != "tool_calls"
        for pattern in (field.open_re, field.close_re)
        if pattern is not None
    ]
    return {
        id: token.content
        for id, token in tokenizer.added_tokens_decoder.items()
        if token.special and any(token.content in pattern for pattern in patterns)
    }


def _linear(template: ResponseTemplate) -> ResponseTemplate | None:
    """The template without fields that cannot be parsed in linear time; None if no answer can be parsed with it."""
    fields = {}
    for name, field in template.fields.items():
        try:
            _check(name, field)
            fields[name] = field
        except UnsupportedPattern as error:
            logger.warning("the field %s of the model's response template is left out: %s", name, error)
    try:
        marks.begun_answer(template, "")
    except UnsupportedPattern as error:
        logger.warning("the model's response template is left out: %s", error)
        return None
    if not fields or template.implicit not in {None, *fields}:
        return None
    return dataclasses.replace(template, fields=fields)


def _check(name: str, field: ResponseTemplateField) -> None:
    empty = [marks.check(pattern) for pattern in (field.open_re, field.close_re) if pattern is not None]
    if all(empty) and len(empty) == (1 if field.open_re is None else 2):
        raise UnsupportedPattern("its delimiters match an empty text")
    if name == "tool_calls":
        call_values.check(field)


def _shown(chat_template: Any) -> dict[str, Any] | None:
    """The format of answers that a chat template shows."""
    if not isinstance(chat_template, str):
        return None
    fields: dict[str, Any] = {}
    for opening, closing in REASONING_MARKS:
        if closing in chat_template:
            fields["reasoning_content"] = {"open": opening, "close": closing, "content": "text"}
    for these, not_these, form in CALLS:
        if all(text in chat_template for text in these) and not any(text in chat_template for text in not_these):
            fields["tool_calls"] = form
            break
    return _declared(fields) if fields else None


def _declared(fields: dict[str, Any]) -> dict[str, Any]:
    return {"defaults": {"role": "assistant"}, "start_anchor": ANCHORS, "fields": fields | {"content": {}}}
