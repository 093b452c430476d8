"""Profiles: capture and interventions under a name, for requests to use."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field, model_validator

from deployments.activations.interventions import Interventions
from deployments.activations.spec import Capture
from deployments.activations.strict import Strict

NONE = "none"  # what a request calls no profile at all
ProfileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}$")]


class Profile(Strict):
    """What a request that uses the profile records and changes on the way.

    Attributes:
        name: Its name.
        model: The model that it is for; any where it is None.
        capture: What is recorded, where the request does not say.
        interventions: What is changed, before the request's own interventions.
        default: Whether requests to the model that name no profile use it.
        description: The user's words.
    """

    model_config = ConfigDict(frozen=True)

    name: ProfileName
    model: str | None = Field(default=None, min_length=1, max_length=256)
    capture: Capture | None = None
    interventions: Interventions | None = None
    default: bool = False
    description: str | None = Field(default=None, max_length=1024)

    @model_validator(mode="after")
    def _can_be_used(self) -> Profile:
        if self.name == NONE:
            raise ValueError(f"{NONE!r} is what requests call no profile: choose another name")
        if self.capture is None and self.interventions is None:
            raise ValueError("give capture, interventions or both")
        if self.default and self.model is None:
            raise ValueError("a default is one model's: name it as model")
        return self
