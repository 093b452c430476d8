"""The calculator by a plain text protocol, for models whose chat template has no tool calls.

The model writes `<calculator>12 * 3</calculator>`, and the next user's message is `<result>36</result>`. A sample's
messages have calls and results as OpenAI writes them; they become text when they are sent.
"""

import json
import re
from typing import Any

Message = dict[str, Any]

END = "</calculator>"  # where an answer stops
INSTRUCTION = (
    "\n\nYou may use a calculator: write <calculator>12 * 3</calculator> and stop. The next message has the value, "
    "as <result>36</result>."
)
_CALL = re.compile(rf"<calculator>(.*?)(?:{END}|\Z)", re.DOTALL)


def as_text(messages: list[Message]) -> list[Message]:
    """The messages as the model sees them, with the protocol explained in the last user message before its first."""
    asked = next((n for n, message in enumerate(messages) if message.get("tool_calls")), len(messages))
    explains = max(n for n, message in enumerate(messages[:asked]) if message["role"] == "user")
    return [_spoken(message, n == explains) for n, message in enumerate(messages)]


def read_call(message: Message, number: int) -> Message:
    """An answer with the call that its text ends in; as it is where there is none.

    Args:
        message: the model's.
        number: of the turn, for the call's id.
    """
    match = _CALL.search(message.get("content") or "")
    if match is None:
        return message
    function = {"name": "calculator", "arguments": json.dumps({"expression": match[1].strip()})}
    call = {"id": f"text-{number}", "type": "function", "function": function}
    return message | {"content": message["content"][: match.start()], "tool_calls": [call]}


def _spoken(message: Message, explains: bool) -> Message:
    if explains:
        return message | {"content": message["content"] + INSTRUCTION}
    if message["role"] == "tool":
        return {"role": "user", "content": f"<result>{message['content']}</result>"}
    if not (calls := message.get("tool_calls")):
        return message
    expression = json.loads(calls[0]["function"]["arguments"])["expression"]
    plain = {name: value for name, value in message.items() if name != "tool_calls"}
    return plain | {"content": f"{message['content']}<calculator>{expression}{END}"}
