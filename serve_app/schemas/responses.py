"""`POST /v1/responses`: its body, and the chat that it stands for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from deployments.engine.request import MOST_LOGPROBS
from deployments.points.strict import Strict
from serve_app.schemas.base import FreeObject, LongText, Name, Unread, only
from serve_app.schemas.generation import ChatRequest, Generation, IgnoredFields
from serve_app.schemas.messages import MOST_MESSAGES, MOST_PARTS
from serve_app.schemas.tools import Function, JsonSchema, NamedFunction, NamedTool, ResponseFormat, TemplateKwargs, Tool

TEXTS = ("input_text", "output_text", "reasoning_text", "summary_text")
NEEDED = {  # by the type of an item: the fields that it must have
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": ("summary",),
}


class TextPart(Strict):
    """A part of a text."""

    type: Literal["input_text", "output_text", "reasoning_text", "summary_text"]
    text: LongText
    annotations: Unread = None
    logprobs: Unread = None
    parsed: Unread = None  # added by `.parse()` of the openai package
    prompt_cache_breakpoint: Unread = None


Parts = Annotated[list[Annotated[TextPart, only(TEXTS, "text only")]], Field(max_length=MOST_PARTS, fail_fast=True)]


class InputItem(Strict):
    """A message, a function call, its output, or thoughts; `NEEDED` names the fields that each must have."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["user", "system", "developer", "assistant"] | None = None
    content: LongText | Parts | None = None
    call_id: Name | None = None
    name: Name | None = None
    arguments: LongText | None = None
    output: LongText | Parts | None = None
    summary: Parts | None = None
    id: Unread = None
    status: Unread = None
    phase: Unread = None
    encrypted_content: Unread = None
    parsed_arguments: Unread = None  # added by `.parse()` of the openai package

    @model_validator(mode="after")
    def _has_its_fields(self) -> InputItem:
        for name in NEEDED[self.type]:
            if getattr(self, name) is None:
                raise ValueError(f"{name} is missing: an item of the type {self.type} needs it")
        return self


Item = Annotated[InputItem, only(tuple(NEEDED), "messages, function calls and reasoning only", default="message")]


def messages_of(items: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages for the chat template of an input's or output's items.

    Thoughts, a text and calls that follow each other in this order are one message.
    """
    messages: list[dict[str, Any]] = []
    for item in items:
        text = _joined(item.get("content"))
        if item["type"] == "function_call_output":
            messages.append({"role": "tool", "content": _joined(item["output"]), "tool_call_id": item["call_id"]})
        elif item["type"] == "message" and item["role"] != "assistant":
            # Many templates know no other role for instructions.
            messages.append({"role": "system" if item["role"] == "developer" else item["role"], "content": text})
        else:
            turn = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
            if turn is None or (item["type"] != "function_call" and turn["content"]):
                turn = {"role": "assistant", "content": ""}
                messages.append(turn)
            if item["type"] == "function_call":
                call = {"id": item["call_id"], "type": "function"}
                call["function"] = {"name": item["name"], "arguments": item["arguments"]}
                turn.setdefault("tool_calls", []).append(call)
            elif item["type"] == "message":
                turn["content"] = text
            else:
                turn["reasoning_content"] = turn.get("reasoning_content", "") + (text or _joined(item["summary"]))
    return messages


def _joined(text: str | list[dict[str, Any]] | None) -> str:
    return text if isinstance(text, str) else "".join(part["text"] for part in text or ())


class FunctionTool(Function):
    """A function that the model may call."""

    type: Literal["function"]


class FunctionChoice(NamedFunction):
    """The one function that must be called."""

    type: Literal["function"]


class PlainFormat(Strict):
    """Any text, or any JSON object."""

    type: Literal["text", "json_object"]


class SchemaFormat(JsonSchema):
    """JSON that follows a schema."""

    type: Literal["json_schema"]


class TextConfig(Strict):
    """The form of the text."""

    format: SchemaFormat | PlainFormat = PlainFormat(type="text")
    verbosity: Literal["low", "medium", "high"] | None = None  # no effect


class ResponseRequest(Generation, IgnoredFields):
    """`POST /v1/responses`."""

    input: LongText | Annotated[list[Item], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)]
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] = Field([], max_length=8)
    instructions: LongText | None = None
    previous_response_id: Name | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    tools: list[Annotated[FunctionTool, only(("function",), "function tools only")]] = Field(
        [], max_length=512, fail_fast=True
    )
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice = "auto"
    parallel_tool_calls: bool = True
    max_tool_calls: int | None = None  # of OpenAI's own tools: no effect
    text: TextConfig = TextConfig()
    reasoning: FreeObject | None = None  # no effect
    top_logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)
    store: bool = True
    chat_template_kwargs: TemplateKwargs | None = None
    background: Literal[False] = False
    truncation: Literal["disabled"] = "disabled"
    n: Literal[1] | None = None
    variants: None = None

    @field_validator("tool_choice")
    @classmethod
    def _can_be_called(cls, value: str | FunctionChoice, info: ValidationInfo) -> str | FunctionChoice:
        names = {tool.name for tool in info.data.get("tools", ())}
        if (value == "required" and not names) or (isinstance(value, FunctionChoice) and value.name not in names):
            raise ValueError("tools has no such function")
        return value

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The input for the chat template."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        return messages_of(item.model_dump() for item in self.input)

    @property
    def chat(self) -> ChatRequest:
        """The chat that this request stands for, without its messages."""
        own = {name: getattr(self, name) for name in self.model_fields_set & ChatRequest.model_fields.keys()}
        own["max_completion_tokens"] = self.max_output_tokens
        own["logprobs"] = "message.output_text.logprobs" in self.include or bool(self.top_logprobs)
        own["tools"] = [Tool(type="function", function=tool) for tool in self.tools]
        if isinstance(self.tool_choice, FunctionChoice):
            own["tool_choice"] = NamedTool(type="function", function=self.tool_choice)
        if "format" in self.text.model_fields_set:
            form = self.text.format
            schema = form if isinstance(form, SchemaFormat) else None
            own["response_format"] = ResponseFormat(type=form.type, json_schema=schema)
        return ChatRequest.model_construct(**own)

    @property
    def repeated(self) -> dict[str, Any]:
        """The fields that its response repeats."""
        names = {*ResponseRequest.__annotations__, "metadata", "temperature", "top_p", "user"} - {"input", "include"}
        given = self.model_dump(include=names, exclude_none=True, by_alias=True)
        return {"metadata": {}, "temperature": 1.0, "top_p": 1.0} | given
