"""The bodies of OpenAI's routes, with Vitrine's fields. Answers are plain dicts (`answers.py`)."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from deployments.engine.request import MOST_LOGPROBS, Sampling
from deployments.points.capture import MOST_PROMPTS
from deployments.points.interventions import Variants
from deployments.points.strict import Strict
from serve_app.schemas.base import MOST_TOKENS, LongText, Name, UnreadObject, packed_ids
from serve_app.schemas.messages import ChatPrompt, Messages
from serve_app.schemas.presets import PresetName, Settings
from serve_app.schemas.tools import NamedTool

TokenIds = Annotated[
    list[Annotated[int, Field(ge=-(2**31), lt=2**31)]],  # the replica checks which of them exist in its model
    Field(min_length=1, max_length=MOST_TOKENS, fail_fast=True),
    AfterValidator(packed_ids),
]
DEFAULT_MAX_TOKENS = 16  # of a completion, as in OpenAI's API
# Fields that would change the answer if they had a meaning here.
REFUSED_WITH_REASON = {
    "audio": "answers are text; there is no audio",
    "web_search_options": "this server does not search the web",
    "moderation": "this server has no moderation",
    "functions": "this is OpenAI's former name of tools: use tools",
    "function_call": "this is OpenAI's former name of tool_choice: use tool_choice",
}


class StreamOptions(Strict):
    """The contents of a stream in addition to its choices."""

    include_usage: bool = False
    include_obfuscation: bool | None = None  # no effect: events are not padded


class Generation(Settings):
    """The fields shared by chats and completions."""

    model: str = Field(min_length=1, max_length=256)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    variants: Variants | None = None
    preset: PresetName | None = None
    intervention_profile: PresetName | None = Field(default=None, description="The former name of preset.")

    @field_validator("stream_options")
    @classmethod
    def _goes_with_a_stream(cls, value: StreamOptions | None, info: ValidationInfo) -> StreamOptions | None:
        if value is not None and not info.data.get("stream"):
            raise ValueError("it is allowed only with stream")
        return value

    @field_validator("variants")
    @classmethod
    def _has_one_answer_each(cls, value: Variants | None, info: ValidationInfo) -> Variants | None:
        for name, other in (("n", info.data.get("n") not in (None, 1)), ("stream", info.data.get("stream"))):
            if value is not None and other:
                raise ValueError(f"variants return one choice each, and whole answers: leave {name} out")
        return value

    @property
    def choices(self) -> int:
        """The number of choices for each prompt."""
        return len(self.variants) if self.variants else self.n or 1

    @property
    def sequences(self) -> int:
        """The number of sequences for each prompt; the likeliest become its choices."""
        return self.choices

    @property
    def sampling(self) -> Sampling:
        """The sampling settings."""
        return Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(self.top_k or 0, 0),  # -1 means none in vLLM
            seed=secrets.randbits(63) if self.variants and self.seed is None else self.seed,  # variants share one
            min_p=self.min_p or 0.0,
            repetition_penalty=self.repetition_penalty or 1.0,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias={int(token): bias for token, bias in (self.logit_bias or {}).items()},
            min_tokens=self.min_tokens or 0,
        )

    @property
    def enforced_schema(self) -> dict[str, Any] | None:
        """The JSON schema that the text must follow; None for any text."""
        return self.response_format.enforced if self.response_format else None

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class IgnoredFields(BaseModel):
    """OpenAI's fields of chats that change nothing, and those that must be null; `docs/http.md` has a row for each."""

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


class ChatRequest(Generation, ChatPrompt, IgnoredFields):
    """`POST /v1/chat/completions`."""

    messages: Messages
    max_completion_tokens: int | None = Field(default=None, ge=0)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)

    @field_validator("top_logprobs")
    @classmethod
    def _goes_with_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and not info.data.get("logprobs"):
            raise ValueError("it is allowed only with logprobs")
        return value

    @field_validator("tool_choice")
    @classmethod
    def _can_be_called(cls, value: str | NamedTool | None, info: ValidationInfo) -> str | NamedTool | None:
        names = {tool.function.name for tool in info.data.get("tools") or ()}
        if (value == "required" or isinstance(value, NamedTool)) and not names:
            raise ValueError("tool_choice needs tools")
        if isinstance(value, NamedTool) and value.function.name not in names:
            message = "there is no function {name} among tools"
            context = {"name": repr(value.function.name), "field": "tool_choice.function.name"}
            raise PydanticCustomError("unknown_function", message, context)
        return value

    @property
    def likeliest(self) -> int | None:
        """The number of top tokens to return with each token; None for no logprobs."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def limit(self) -> tuple[int | None, str]:
        """The most new tokens, and the field that limits them."""
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens, "max_completion_tokens"
        return self.max_tokens, "max_tokens"

    @property
    def callable_tools(self) -> list[dict[str, Any]] | None:
        """The tools, unless the request forbids calls."""
        if not self.tools or self.tool_choice == "none":
            return None
        return [tool.model_dump(exclude_none=True) for tool in self.tools]

    @property
    def must_call(self) -> tuple[str, ...]:
        """The functions of which one must be called; empty if a call is optional."""
        if isinstance(self.tool_choice, NamedTool):
            return (self.tool_choice.function.name,)
        return tuple(tool.function.name for tool in self.tools or ()) if self.tool_choice == "required" else ()

    @property
    def parallel_calls(self) -> bool:
        """Whether an answer may make several calls; a named function is called once."""
        return self.parallel_tool_calls is not False and not isinstance(self.tool_choice, NamedTool)


class CompletionRequest(Generation):
    """`POST /v1/completions`."""

    prompt: (
        LongText
        | TokenIds  # an array after parsing
        | Annotated[list[LongText], Field(min_length=1, max_length=MOST_PROMPTS, fail_fast=True)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MOST_PROMPTS, fail_fast=True)]
    )
    max_tokens: int | None = Field(default=DEFAULT_MAX_TOKENS, ge=0)
    logprobs: int | None = Field(default=None, ge=0, le=5)
    echo: bool | None = None
    best_of: int | None = Field(default=None, ge=1, le=128)
    suffix: None = None

    @field_validator("best_of")
    @classmethod
    def _is_picked_from(cls, value: int | None, info: ValidationInfo) -> int | None:
        returned = info.data.get("n") or 1
        if value is not None and value < returned:
            raise ValueError(f"best_of is {value}, but n asks for {returned}: set best_of to at least n")
        if value is not None and value > returned:
            if info.data.get("stream"):
                raise ValueError("with stream it must equal n, because the best are known only at the end")
            stores = any(readout.store for readout in info.data.get("readouts") or ())
            if info.data.get("capture") or info.data.get("store_activations") or stores:
                raise ValueError(
                    "with activations it must equal n, because sequences that are not returned would be recorded, too",
                )
        return value

    @field_validator("suffix", mode="before")
    @classmethod
    def _is_not_served(cls, value: Any) -> None:
        if value is not None:
            raise ValueError("a causal model cannot read text after its prompt: leave suffix out")

    @property
    def sequences(self) -> int:
        """The number of sequences for each prompt; the likeliest become its choices."""
        return self.best_of or self.choices

    @model_validator(mode="after")
    def _variants_have_one_prompt(self) -> CompletionRequest:
        if self.variants and (len(self.prompts) > 1 or self.best_of):
            context = {"field": "variants"}
            raise PydanticCustomError("value_error", "send one prompt with variants, and leave out best_of", context)
        return self

    @property
    def prompts(self) -> list[str | Sequence[int]]:
        """The prompts, each text or token ids."""
        return [*self.prompt] if isinstance(self.prompt, list) else [self.prompt]
