"""Conditions on a readout's value: those of requests, and the monitors of the operator's options."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, model_validator

from deployments.points.strict import Strict

ReadoutName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}$")]
Number = Annotated[float, Field(allow_inf_nan=False, ge=-3.4e38, le=3.4e38)]


class Condition(Strict):
    """A condition on one value of a readout.

    Attributes:
        readout: The readout's name.
        above: Met while the value is above this.
        below: Met while the value is below this.
        feature: The value's index.
        label: The value's label.
        rows: Met after this many consecutive rows.
    """

    model_config = ConfigDict(frozen=True)

    readout: ReadoutName
    above: Number | None = None
    below: Number | None = None
    feature: int | None = Field(default=None, ge=0)
    label: str | None = Field(default=None, max_length=256)
    rows: int = Field(default=1, ge=1, le=1024, alias="for")

    @model_validator(mode="after")
    def _compares_once(self) -> Condition:
        if (self.above is None) == (self.below is None):
            raise ValueError("give either above or below")
        if self.feature is not None and self.label is not None:
            raise ValueError("give feature or label, not both")
        return self


class Monitor(Condition):
    """A readout that reads every request, and the condition that tags or ends an answer.

    Attributes:
        do: Whether an answer that meets the condition is only tagged, or also ended.
        tokens: The tokens whose rows it reads.
        name: Its name in tags, columns and the log; by default the readout's.
        owner: With API keys, the readout's owner; None for a readout without an owner.
        model: The model that it is for; None for every model of the server.
    """

    model_config = ConfigDict(serialize_by_alias=True)

    do: Literal["tag", "stop"] = "tag"
    tokens: Literal["generated", "all"] = "generated"
    name: ReadoutName | None = None
    owner: str | None = Field(default=None, min_length=1, max_length=256)
    model: str | None = Field(default=None, min_length=1, max_length=256)

    @property
    def called(self) -> str:
        """Its name."""
        return self.name or self.readout
