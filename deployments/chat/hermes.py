"""Hermes' form of tool calls, for models whose chat template shows none: a system message describes the tools."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from deployments.chat.tool_calls import Separators, ToolCallFormat

BEGIN, END = '<tool_call>\n{"name": "', "}\n</tool_call>"
FORMAT = ToolCallFormat(BEGIN, '", "arguments": ', f"{END}\n{BEGIN}", END, Separators(": ", ", "))
# The words of NousResearch's models and of Qwen 2.5.
TOOLS = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def plain(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, with_system: bool = True
) -> list[dict[str, Any]]:
    """OpenAI's messages with the tools, calls and results as text, of the roles `system`, `user` and `assistant`.

    Without `with_system`, for templates that show no system message, the tools stand before the first text.
    """
    written: list[dict[str, Any]] = []
    role = None
    for message in messages:
        text = message.get("content") or ""
        calls = [_call(**call["function"]) for call in message.get("tool_calls") or ()]
        kept = {name: value for name, value in message.items() if name != "tool_calls"}
        if message["role"] == "tool":
            kept = {"role": "user"}
            text = f"<tool_response>\n{text}\n</tool_response>"
        if kept["role"] == "user" and role == "tool":  # one message: many templates want roles to alternate
            text = f"{written.pop()['content']}\n{text}"
        written.append({**kept, "content": "\n".join(filter(None, [text, *calls]))})
        role = message["role"]
    if tools:
        described = TOOLS.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
        if written[0]["role"] == "system":
            written[0]["content"] += f"\n\n{described}"
        elif with_system:
            written.insert(0, {"role": "system", "content": described})
        else:
            written[0]["content"] = f"{described}\n\n{written[0]['content']}"
    return written


def _call(name: str, arguments: str) -> str:
    return FORMAT.begin + json.dumps(name)[1:-1] + FORMAT.middle + (arguments.strip() or "{}") + FORMAT.end
