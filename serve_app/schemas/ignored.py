"""OpenAI's documented fields that have no effect here, and those that are rejected with a reason.

`docs/http.md` has a row for each.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationInfo, field_validator

from serve_app.schemas.base import Name, UnreadObject

# Fields that would change the answer if they had a meaning here.
REFUSED_WITH_REASON = {
    "audio": "answers are text; there is no audio",
    "web_search_options": "this server does not search the web",
    "moderation": "this server has no moderation",
    "functions": "this is OpenAI's former name of tools: use tools",
    "function_call": "this is OpenAI's former name of tool_choice: use tool_choice",
}


class IgnoredFields(BaseModel):
    """Fields of chats that are accepted and change nothing, and fields that must be null."""

    modalities: list[Literal["text"]] | None = Field(default=None, min_length=1, max_length=1)
    prediction: UnreadObject | None = None
    prompt_cache_key: Name | None = None
    prompt_cache_options: UnreadObject | None = None
    prompt_cache_retention: Name | None = None
    reasoning_effort: Name | None = None
    safety_identifier: Name | None = None
    service_tier: Name | None = None
    store: bool | None = None
    verbosity: Literal["low", "medium", "high"] | None = None

    audio: None = None
    web_search_options: None = None
    moderation: None = None
    functions: None = None
    function_call: None = None

    @field_validator(*REFUSED_WITH_REASON, mode="before")
    @classmethod
    def _is_refused(cls, value: Any, info: ValidationInfo) -> None:
        if value is not None:
            raise ValueError(REFUSED_WITH_REASON[str(info.field_name)])
