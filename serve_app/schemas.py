"""The wire: what OpenAI's routes take, with this project's fields. Answers are plain dicts (`answers.py`)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from deployments.activations.facts import check_session_id
from deployments.activations.spec import Capture
from deployments.engine.request import MOST_LOGPROBS, Sampling

Stop = Annotated[str, Field(min_length=1, max_length=1024)]
TokenIds = Annotated[list[int], Field(min_length=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]


class Wire(BaseModel):
    """A JSON object whose every field is known: an ignored `captrue` would cost a user their data."""

    model_config = ConfigDict(extra="forbid", strict=True)


class TextPart(Wire):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class FunctionCall(Wire):
    """What a tool call calls; `arguments` is JSON text."""

    name: str
    arguments: str


class ToolCall(Wire):
    """A call that the model made earlier in the chat."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(Wire):
    """One message of a chat.

    The fields after `tool_call_id` say nothing to the model: clients send back the assistant's messages as
    they got them.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None
    run_id: str | None = None
    session_id: str | None = None
    activation_files: dict[str, str] | None = None

    @property
    def spoken(self) -> dict[str, Any]:
        """What the chat template sees."""
        told = self.model_dump(include={"name", "tool_calls", "tool_call_id"}, exclude_none=True)
        # Many templates know no other role for instructions, and drop contents that are no string.
        role = "system" if self.role == "developer" else self.role
        text = "".join(part.text for part in self.content) if isinstance(self.content, list) else self.content
        return {"role": role, "content": text} | told

    @model_validator(mode="after")
    def _has_content(self) -> ChatMessage:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError("content is missing; only an assistant's message with tool_calls goes without")
        return self


class Function(Wire):
    """A function the model may call, its parameters as JSON schema."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] = Field(default_factory=dict)
    strict: bool | None = None


class Tool(Wire):
    """A tool the model may call."""

    type: Literal["function"]
    function: Function


class StreamOptions(Wire):
    """What a stream holds besides its choices."""

    include_usage: bool = False


class ResponseFormat(Wire):
    """The form of an answer; text is the only one served."""

    type: Literal["text"]


class Generation(Wire):
    """What chat and completions share."""

    model: str = Field(min_length=1, max_length=256)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=0, le=2**31 - 1)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    n: int | None = Field(default=None, ge=1, le=128)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100)
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Bias] | None = Field(default=None, max_length=1024)
    min_tokens: int | None = Field(default=None, ge=0)
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    stop_token_ids: list[Annotated[int, Field(ge=0)]] | None = Field(default=None, max_length=256)
    ignore_eos: bool = False
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    response_format: ResponseFormat | None = None
    store_activations: bool | None = None
    capture: Capture | None = None
    session_id: str | None = None

    @field_validator("session_id")
    @classmethod
    def _session_is_a_name(cls, value: str | None) -> str | None:
        return value if value is None else check_session_id(value)

    @field_validator("logit_bias")
    @classmethod
    def _names_token_ids(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for key in value or ():
            if not re.fullmatch(r"0|[1-9][0-9]{0,9}", key):
                raise ValueError(f"its keys are token ids, and {key[:20]!r} is none")
        return value

    @field_validator("stream_options")
    @classmethod
    def _goes_with_a_stream(cls, value: StreamOptions | None, info: ValidationInfo) -> StreamOptions | None:
        if value is not None and not info.data.get("stream"):
            raise ValueError("goes with stream only")
        return value

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, body: Any) -> Any:
        """Refuse what JSON can write and no text can hold: half of a surrogate pair."""
        field = _unpaired(body, "")
        if field is not None:
            raise PydanticCustomError("not_text", "the text holds half of a surrogate pair", {"field": field})
        return body

    @model_validator(mode="after")
    def _options_fit(self) -> Generation:
        if self.capture and self.store_activations is False:
            raise ValueError("store_activations is false, but capture asks for activations")
        return self

    @property
    def choices(self) -> int:
        """How many choices each prompt gets."""
        return self.n or 1

    @property
    def sampling(self) -> Sampling:
        """How tokens are drawn."""
        return Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=self.top_k or 0,
            seed=self.seed,
            min_p=self.min_p or 0.0,
            repetition_penalty=self.repetition_penalty or 1.0,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias={int(token): bias for token, bias in (self.logit_bias or {}).items()},
            min_tokens=self.min_tokens or 0,
        )

    @property
    def capturing(self) -> Capture | None:
        """What to record; the model's default points where the request names none."""
        return self.capture or (Capture() if self.store_activations else None)

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class ChatRequest(Generation):
    """`POST /v1/chat/completions`."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=0)
    max_completion_tokens: int | None = Field(default=None, ge=0)
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)

    @field_validator("top_logprobs")
    @classmethod
    def _goes_with_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and not info.data.get("logprobs"):
            raise ValueError("goes with logprobs only")
        return value

    @property
    def likeliest(self) -> int | None:
        """How many likeliest tokens to score beside each token; None to score none."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def limit(self) -> tuple[int | None, str]:
        """The most new tokens, and which field says so."""
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens, "max_completion_tokens"
        return self.max_tokens, "max_tokens"

    @property
    def callable_tools(self) -> list[dict[str, Any]] | None:
        """The tools, unless the request says that none may be called."""
        if not self.tools or self.tool_choice == "none":
            return None
        return [tool.model_dump(exclude_none=True) for tool in self.tools]


class CompletionRequest(Generation):
    """`POST /v1/completions`."""

    prompt: (
        str
        | TokenIds
        | Annotated[list[str], Field(min_length=1, max_length=256)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=256)]
    )
    max_tokens: int | None = Field(default=16, ge=0)
    logprobs: int | None = Field(default=None, ge=0, le=5)

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, one or many, each text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


def _unpaired(value: Any, path: str) -> str | None:
    """The path of a text that UTF-8 cannot write, if there is one."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return path
        return None
    inner: Iterable[tuple[str, Any]] = ()
    if isinstance(value, dict):
        inner = ((f"{path}.{key}" if path else str(key), item) for key, item in value.items())
    elif isinstance(value, list):
        inner = ((f"{path}[{i}]", item) for i, item in enumerate(value))
    return next((found for name, item in inner if (found := _unpaired(item, name)) is not None), None)
