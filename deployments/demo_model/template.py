"""The chat template and the response template that are saved with the tokenizer."""

from typing import Any

CHAT_TEMPLATE = r"""
{%- macro text(content) -%}
    {%- if content is string -%}
        {{- content -}}
    {%- elif content is not none -%}
        {%- for part in content if part.type == 'text' -%}{{- part.text -}}{%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- macro call(tool_call) -%}
    {%- set function = tool_call.function if tool_call.function else tool_call -%}
    {{- '<tool_call>\n{"name": "' + function.name + '", "arguments": ' -}}
    {{- function.arguments if function.arguments is string else function.arguments | tojson -}}
    {{- '}\n</tool_call>' -}}
{%- endmacro -%}
{%- set system_roles = ['system', 'developer'] -%}
{%- if tools -%}
    {{- '<|im_start|>system\n' -}}
    {%- if messages and messages[0].role in system_roles -%}
        {{- text(messages[0].content) + '\n' -}}
    {%- endif -%}
    {{- '<tools>\n' -}}
    {%- for tool in tools -%}
        {%- set function = tool.function if tool.function else tool -%}
        {%- set parameters = function.parameters.properties if function.parameters else {} -%}
        {{- function.name + '(' + (parameters or {}) | join(', ') + ')\n' -}}
    {%- endfor -%}
    {{- '</tools><|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role in system_roles -%}
        {%- if not (tools and loop.first) -%}
            {{- '<|im_start|>system\n' + text(message.content) + '<|im_end|>\n' -}}
        {%- endif -%}
    {%- elif message.role == 'tool' -%}
        {{- '<|im_start|>tool\n<tool_response>\n' + text(message.content) -}}
        {{- '\n</tool_response><|im_end|>\n' -}}
    {%- elif message.role == 'assistant' -%}
        {%- set body = text(message.content) -%}
        {{- '<|im_start|>assistant\n' + body -}}
        {%- for tool_call in message.tool_calls or [] -%}
            {{- '\n' if body or not loop.first -}}
            {{- call(tool_call) -}}
        {%- endfor -%}
        {{- '<|im_end|>\n' -}}
    {%- else -%}
        {{- '<|im_start|>user\n' + text(message.content) + '<|im_end|>\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\n' -}}
{%- endif -%}
""".strip()

RESPONSE_TEMPLATE: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            # The leading whitespace is the template's own, between the sentence and the call.
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        # The trailing whitespace is the template's line end; left over, it would open an empty content.
        "content": {"close_pattern": r"\s*(?:<\|im_end\|>|<\|endoftext\|>)\s*", "content": "text"},
    },
}
