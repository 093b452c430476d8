"""The bodies of `/models/load`, `/models/unload`, `/v1/model/attribution`, and vLLM's `/tokenize` and `/detokenize`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
from pydantic import AfterValidator, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from deployments.job import Text
from deployments.options import Attention, Dtype, adapted
from deployments.points.strict import Strict
from deployments.savepoint import Savepoint
from deployments.scaling import checked
from serve_app.schemas.base import MOST_TOKENS, LongText, TokenId, packed_ids
from serve_app.schemas.messages import ChatPrompt
from serve_app.schemas.tools import CallFormat

GpuOrCpu = Annotated[str, Field(pattern=r"^(cpu|cuda(:[0-9]{1,3})?)$")]
DeviceMap = (
    Literal["auto", "balanced", "balanced_low_0", "sequential"]
    | GpuOrCpu
    | Annotated[
        dict[Annotated[str, Field(max_length=256)], Annotated[int, Field(ge=0, le=999)] | GpuOrCpu],
        Field(min_length=1, max_length=4096, fail_fast=True),
    ]
)


MOST_REPLICAS = 128


def _scales(fields: dict[str, float]) -> Any:
    if fields.get("max_replicas", 1) > MOST_REPLICAS:
        raise ValueError(f"max_replicas: must be at most {MOST_REPLICAS}")
    return checked(fields)


# Ray Serve's `AutoscalingConfig` without `policy`, which names code: only numbers are taken.
Autoscaling = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[float, Field(ge=0, le=1e6)]],
    Field(max_length=32, fail_fast=True),
    AfterValidator(_scales),
]


class LoadRequest(Strict):
    """`POST /models/load`.

    `model_id` and `adapter` name a repository or a directory of the operator, never a path.
    """

    model_id: str = Field(min_length=1, max_length=128)
    revision: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,127}$")
    adapter: str | None = Field(default=None, min_length=1, max_length=128)
    dtype: Dtype = "auto"
    attention: Attention = "auto"
    device_map: DeviceMap | None = None
    trust_remote_code: bool = False
    max_seq_len: int | None = Field(default=None, ge=2, le=2**31 - 1)
    num_replicas: int = Field(default=1, ge=1, le=MOST_REPLICAS)
    autoscaling: Autoscaling | None = None
    savepoints: list[Savepoint] = Field(default_factory=list, max_length=256, fail_fast=True)

    @field_validator("model_id", "adapter")
    @classmethod
    def _names_a_repository(cls, value: str | None) -> str | None:
        try:
            if value is not None:
                validate_repo_id(value)
        except HFValidationError as error:
            raise ValueError(str(error)) from error
        return value

    @field_validator("revision")
    @classmethod
    def _stays_in_its_repository(cls, value: str | None) -> str | None:
        if value is not None and ".." in value:
            raise ValueError("the name of a branch, tag or commit cannot contain '..'")
        return value

    @model_validator(mode="after")
    def _scales_one_way(self) -> LoadRequest:
        if self.autoscaling and self.num_replicas != 1:
            raise _wrong("num_replicas", "set either num_replicas or autoscaling")
        return self

    @property
    def served_name(self) -> str:
        """The id of the model that it loads."""
        return adapted(self.model_id, self.adapter)

    @property
    def settings(self) -> dict[str, Any]:
        """The options that it sets; the others keep their defaults, or the values of the loaded model."""
        return self.model_dump(mode="json", exclude={"model_id"}, exclude_unset=True)


class UnloadRequest(Strict):
    """`POST /models/unload`."""

    model_id: str = Field(min_length=1, max_length=256)


class TokenizeRequest(Strict, ChatPrompt):
    """`POST /tokenize`: a prompt, or a chat as the model's template writes it."""

    model: str | None = Field(default=None, min_length=1, max_length=256)
    prompt: LongText | None = None
    tool_call_format: CallFormat | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _is_one_text(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise _wrong("prompt", "give either prompt or messages")
        for field in ("tools", "tool_call_format", "chat_template_kwargs", "continue_final_message"):
            if getattr(self, field) and self.messages is None:
                raise _wrong(field, "it is allowed only with messages")
        return self

    @property
    def text(self) -> Text:
        """The text to tokenize; the text of a chat template already has its special tokens."""
        special = self.messages is None if self.add_special_tokens is None else self.add_special_tokens
        return Text(
            prompt=self.prompt,
            messages=None if self.messages is None else [message.spoken for message in self.messages],
            tools=[tool.model_dump(exclude_none=True) for tool in self.tools] if self.tools else None,
            tool_call_format=self.tool_call_format,
            template_kwargs=self.chat_template_kwargs or {},
            add_special_tokens=special,
            ending=self.ending,
            strings=bool(self.return_token_strs),
        )


class AttributionRequest(TokenizeRequest):
    """`POST /v1/model/attribution`: a prompt, and a token whose logit is divided, or two for their difference."""

    targets: list[Annotated[str, Field(min_length=1, max_length=256)] | TokenId] = Field(min_length=1, max_length=2)
    by: Literal["layer", "head", "neuron"] = "layer"


class DetokenizeRequest(Strict):
    """`POST /detokenize`."""

    model: str | None = Field(default=None, min_length=1, max_length=256)
    tokens: Annotated[list[TokenId], Field(max_length=MOST_TOKENS, fail_fast=True), AfterValidator(packed_ids)]
    return_token_strs: bool | None = None


def _wrong(field: str, message: str) -> PydanticCustomError:
    return PydanticCustomError("value_error", "{reason}", {"reason": message, "field": field})
