"""Profiles: a capture and interventions saved under a name, for requests to use."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from deployments.points.capture import Capture
from deployments.points.interventions import Interventions
from deployments.points.strict import Strict
from deployments.points.token_choices import AMBIGUOUS, Last

NONE = "none"  # a request's word for no profile
ProfileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}$")]


class Profile(Strict):
    """The capture and interventions of requests that use the profile.

    Attributes:
        name: Its name.
        model: The model that it is for; None for any.
        capture: What is recorded, unless the request has its own capture.
        interventions: Interventions, applied before the request's own.
        default: Whether requests to the model that name no profile use it.
        description: Any text.
    """

    model_config = ConfigDict(frozen=True)

    name: ProfileName
    model: str | None = Field(default=None, min_length=1, max_length=256)
    capture: Capture | None = None
    interventions: Interventions | None = None
    default: bool = False
    description: str | None = Field(default=None, max_length=1024)

    @field_validator("interventions")
    @classmethod
    def _names_tokens_of_any_request(cls, value: Interventions | None) -> Interventions | None:
        for i, spec in enumerate(value or ()):
            if spec.tokens in ("last", "generated_last") or isinstance(spec.tokens, Last):
                raise PydanticCustomError("ambiguous_tokens", AMBIGUOUS, {"field": f"interventions[{i}].tokens"})
        return value

    @model_validator(mode="after")
    def _can_be_used(self) -> Profile:
        if self.name == NONE:
            raise ValueError(f"{NONE!r} means no profile in requests: choose another name")
        if self.capture is None and not self.interventions:
            raise ValueError("give capture, interventions or both")
        if self.default and self.model is None:
            raise ValueError("a default profile needs a model")
        return self
