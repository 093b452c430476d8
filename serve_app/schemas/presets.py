"""The fields of requests that presets may hold, and the body of a preset."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from deployments.activations.facts import check_session_id
from deployments.conditions import Condition
from deployments.points.capture import Capture
from deployments.points.interventions import Interventions
from deployments.points.logit_lens import LogitLens
from deployments.points.strict import Strict
from deployments.points.token_choices import AMBIGUOUS, Last
from deployments.readouts.spec import AskedReadouts
from serve_app.schemas.base import Name, TokenId
from serve_app.schemas.tools import CallFormat, ResponseFormat

NONE = "none"  # a request's word for no preset
PRESET_NAME = re.compile(r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}$")
PresetName = Annotated[str, Field(pattern=PRESET_NAME.pattern)]
Stop = Annotated[str, Field(min_length=1, max_length=1024)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]
BiasKey = Annotated[str, Field(max_length=10)]


class Settings(Strict):
    """The fields that chats and completions share, without those that choose the model or the form of the answer."""

    max_tokens: int | None = Field(default=None, ge=0)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=2**31 - 1)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    n: int | None = Field(default=None, ge=1, le=128)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100)
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[BiasKey, Bias] | None = Field(default=None, max_length=1024, fail_fast=True)
    min_tokens: int | None = Field(default=None, ge=0)
    stop: Stop | Annotated[list[Stop], Field(max_length=16, fail_fast=True)] | None = None
    stop_token_ids: list[TokenId] | None = Field(default=None, max_length=256, fail_fast=True)
    ignore_eos: bool = False
    user: Name | None = None
    metadata: dict[Name, Name] | None = Field(default=None, max_length=64, fail_fast=True)
    response_format: ResponseFormat | None = None
    tool_call_format: CallFormat | None = None  # of chats
    return_token_ids: bool | None = None
    store_activations: bool | None = None
    capture: Capture | None = None
    interventions: Interventions | None = None
    logit_lens: LogitLens | None = None
    readouts: AskedReadouts | None = None
    stop_when: Condition | None = None
    report: bool = False
    session_id: Annotated[str, Field(max_length=128)] | None = None

    @field_validator("session_id")
    @classmethod
    def _session_is_a_name(cls, value: str | None) -> str | None:
        return value if value is None else check_session_id(value)

    @field_validator("logit_bias")
    @classmethod
    def _names_token_ids(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for key in value or ():
            if not re.fullmatch(r"0|[1-9][0-9]{0,9}", key):
                raise ValueError(f"its keys must be token ids, but {key[:20]!r} is not one")
        return value

    @model_validator(mode="after")
    def _options_fit(self) -> Settings:
        if self.capture and self.store_activations is False:
            raise ValueError("store_activations is false, but capture requests activations")
        return self

    @property
    def recorded(self) -> Capture | None:
        """What is recorded; without points of its own if only values of readouts are."""
        if self.capture or self.store_activations:
            return self.capture or Capture()
        has_columns = self.store_activations is None and any(readout.store for readout in self.readouts or ())
        return Capture.model_construct(points=[]) if has_columns else None


class PresetBody(Settings):
    """`POST /v1/interventions`: fields that are merged below those of requests which use the preset.

    Attributes:
        name: Its name.
        model: The model that it is for; None for any.
        default: Whether requests to the model that name no preset use it.
        description: Any text.
    """

    name: PresetName
    model: str | None = Field(default=None, min_length=1, max_length=256)
    default: bool = False
    description: str | None = Field(default=None, max_length=1024)

    @field_validator("name")
    @classmethod
    def _can_be_chosen(cls, value: str) -> str:
        if value == NONE:
            raise ValueError(f"{NONE!r} means no preset in requests: choose another name")
        return value

    @model_validator(mode="after")
    def _names_tokens_of_any_request(self) -> PresetBody:
        chosen: dict[str, Any] = {
            f"interventions[{i}].tokens": spec.tokens for i, spec in enumerate(self.interventions or ())
        }
        if self.logit_lens:
            chosen["logit_lens.tokens"] = self.logit_lens.tokens
        for field, tokens in chosen.items():
            if tokens in ("last", "generated_last") or isinstance(tokens, Last):
                raise PydanticCustomError("ambiguous_tokens", AMBIGUOUS, {"field": field})
        return self

    @model_validator(mode="after")
    def _can_be_used(self) -> PresetBody:
        fields = self.model_fields_set & Settings.model_fields.keys()
        if not any(getattr(self, name) not in (None, []) for name in fields):
            raise ValueError("give at least one field of requests, such as capture or interventions")
        if self.default and self.model is None:
            raise PydanticCustomError("value_error", "a default preset needs a model", {"field": "model"})
        return self


def merged(below: Mapping[str, Any], body: Mapping[str, Any], by_default: bool = False) -> dict[str, Any]:
    """All fields of a body and those below it; the body's replace them. A field that is null counts as left out.

    Args:
        below: The fields of a header or a preset; `interventions` of these precede the body's.
        body: The fields of the body.
        by_default: Whether the request does not name the preset: it then records only with `store_activations`.
    """
    own = {name: value for name, value in body.items() if value is not None}
    fields = {**below, **own}
    first, further = below.get("interventions"), own.get("interventions", [])
    if isinstance(first, list) and isinstance(further, list):
        fields["interventions"] = [*first, *further]
    if "capture" in own and "store_activations" not in own:
        fields = {name: value for name, value in fields.items() if (name, value) != ("store_activations", False)}
    elif fields.get("store_activations") is False or (by_default and not fields.get("store_activations")):
        if "capture" not in own:
            fields.pop("capture", None)
        if "readouts" not in own and isinstance(fields.get("readouts"), list):
            fields["readouts"] = [
                asked | {"store": False} if isinstance(asked, dict) else asked for asked in fields["readouts"]
            ]
    return fields
