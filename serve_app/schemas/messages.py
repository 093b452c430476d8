"""The messages of a chat, in OpenAI's format."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, ValidationInfo, field_validator, model_validator

from deployments.job import Ending
from deployments.points.strict import Strict
from serve_app.schemas.base import LongText, Name, Unread, UnreadObject, free_json, only, unread
from serve_app.schemas.tools import TemplateKwargs, Tools

MOST_MESSAGES = 4096  # of a chat
MOST_PARTS = 1024  # of a message
MOST_CALLS = 256  # of a message
MOST_FILES = 16384  # that an answer can name: one for each captured point
Annotations = Annotated[list[Any], Field(max_length=MOST_PARTS, fail_fast=True), free_json(), AfterValidator(unread)]
FileNames = Annotated[dict[Name, Name], Field(max_length=MOST_FILES, fail_fast=True), AfterValidator(unread)]


class TextPart(Strict):
    """A part of a message's content."""

    type: Literal["text"]
    text: LongText
    prompt_cache_breakpoint: Unread = None


class RefusalPart(Strict):
    """A refusal as a part of an assistant's content."""

    type: Literal["refusal"]
    text: LongText = Field(alias="refusal")


Part = Annotated[TextPart | RefusalPart, only(("text", "refusal"), "text only")]
Parts = Annotated[list[Part], Field(max_length=MOST_PARTS, fail_fast=True)]


class FunctionCall(Strict):
    """The function and arguments of a tool call; `arguments` is JSON text."""

    name: Name
    arguments: LongText
    parsed_arguments: Unread = Field(default=None, exclude=True)  # added by `.parse()` of the openai package


class ToolCall(Strict):
    """An earlier tool call of the model."""

    id: Name
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = Field(default=None, exclude=True)  # present in streams


class ChatMessage(Strict):
    """One message of a chat.

    The model does not see the fields after `reasoning_content`: clients return the assistant's messages as they
    received them.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: LongText | Parts | None = None
    refusal: LongText | None = None  # the assistant's text if it has no content
    name: Name | None = None
    tool_calls: list[ToolCall] | None = Field(default=None, max_length=MOST_CALLS, fail_fast=True)
    tool_call_id: Name | None = None
    reasoning_content: LongText | None = None
    type: Literal["text"] | None = None  # sent by lm_eval up to 0.4.9 with every message
    parsed: Unread = None  # added by `.parse()` of the openai package
    provider_specific_fields: UnreadObject | None = None  # added by litellm
    annotations: Annotations | None = None
    audio: None = None
    function_call: None = None
    run_id: Name | None = None
    session_id: Name | None = None
    activation_files: FileNames | None = None

    @property
    def spoken(self) -> dict[str, Any]:
        """The message for the chat template."""
        # Some templates take an empty list for a call.
        names = {"name", "tool_call_id", "reasoning_content", *(["tool_calls"] if self.tool_calls else [])}
        further = self.model_dump(include=names, exclude_none=True)
        # Many templates know no other role for instructions, and ignore contents that are not strings.
        role = "system" if self.role == "developer" else self.role
        text = "".join(part.text for part in self.content) if isinstance(self.content, list) else self.content
        return {"role": role, "content": text or self.refusal or ""} | further

    @model_validator(mode="after")
    def _has_content(self) -> ChatMessage:
        if self.content is None and not (self.role == "assistant" and (self.tool_calls or self.refusal)):
            raise ValueError("content is missing; only an assistant's message with tool_calls may omit it")
        return self


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)]


class ChatPrompt(BaseModel):
    """The fields from which the chat template makes a prompt."""

    messages: Messages | None = None
    tools: Tools | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @property
    def ending(self) -> Ending:
        """Where the prompt ends."""
        if self.continue_final_message:
            return "message"
        return "turn" if self.add_generation_prompt is False else "answer"

    @field_validator("continue_final_message")
    @classmethod
    def _has_one_to_continue(cls, value: bool | None, info: ValidationInfo) -> bool | None:
        if value and info.data.get("add_generation_prompt"):
            raise ValueError("it cannot be combined with add_generation_prompt, with which a new message begins")
        last = (info.data.get("messages") or [None])[-1]
        if value and last and (last.role != "assistant" or last.tool_calls):
            raise ValueError("the last message must be the assistant's, without tool_calls")
        return value
