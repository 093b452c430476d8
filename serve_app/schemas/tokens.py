"""The bodies of `/tokenize` and `/detokenize`, as in vLLM."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from deployments.job import Text
from serve_app.schemas.base import MOST_TOKENS, LongText, TokenId, WireModel, packed_ids
from serve_app.schemas.messages import Messages
from serve_app.schemas.tools import TemplateKwargs, Tools


class TokenizeRequest(WireModel):
    """`POST /tokenize`: a prompt, or a chat as the model's template writes it."""

    model: str | None = Field(default=None, min_length=1, max_length=256)
    prompt: LongText | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _is_one_text(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise _wrong("prompt", "give either prompt or messages")
        if self.tools and self.messages is None:
            raise _wrong("tools", "it is allowed only with messages")
        if self.chat_template_kwargs and self.messages is None:
            raise _wrong("chat_template_kwargs", "it is allowed only with messages")
        return self

    @property
    def text(self) -> Text:
        """The text to tokenize; the text of a chat template already has its special tokens."""
        special = self.messages is None if self.add_special_tokens is None else self.add_special_tokens
        return Text(
            prompt=self.prompt,
            messages=None if self.messages is None else [message.spoken for message in self.messages],
            tools=[tool.model_dump(exclude_none=True) for tool in self.tools] if self.tools else None,
            template_kwargs=self.chat_template_kwargs or {},
            add_special_tokens=special,
            add_generation_prompt=self.add_generation_prompt,
            strings=bool(self.return_token_strs),
        )


class DetokenizeRequest(WireModel):
    """`POST /detokenize`."""

    model: str | None = Field(default=None, min_length=1, max_length=256)
    tokens: Annotated[list[TokenId], Field(max_length=MOST_TOKENS, fail_fast=True), AfterValidator(packed_ids)]
    return_token_strs: bool | None = None


def _wrong(field: str, message: str) -> PydanticCustomError:
    return PydanticCustomError("value_error", "{reason}", {"reason": message, "field": field})
