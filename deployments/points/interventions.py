"""The `interventions` field of a request: which activations to change."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from deployments.conditions import Condition, Number, ReadoutName
from deployments.points.capture import Features, Heads
from deployments.points.strict import Strict
from deployments.points.token_choices import TokenChoice

MOST_NUMBERS = 1 << 20  # of a vector
# Numbers, or a tensor that was sent before: `id`, or `id/name` of a file with several.
Vector = (
    Annotated[list[Number], Field(min_length=1, max_length=MOST_NUMBERS, fail_fast=True)]
    | Annotated[str, Field(max_length=512)]
)


class _Spec(Strict):
    model_config = ConfigDict(frozen=True)


class _Intervention(_Spec):
    """The fields of all operations: point, tokens, features, heads and condition."""

    point: str = Field(min_length=1, max_length=256)
    tokens: TokenChoice = "all"
    features: Features | None = None
    heads: Heads | None = None
    when: Condition | None = None


class Add(_Intervention):
    """x + scale * vector; in units of the residual norm, x + scale * |x| * vector / |vector|.

    `relative` is another name for `unit`: true for `residual_norm`, false for `absolute`.
    """

    op: Literal["add"]
    vector: Vector
    scale: Number = 1.0
    unit: Literal["absolute", "residual_norm"] = "absolute"
    relative: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _spares_the_first_token(cls, given: Any) -> Any:
        """In units of the norm, the default is all tokens but the first, whose norm is often a hundred times as large.

        Most attention rests on that row, so that a change of its size ends in nonsense.
        """
        if isinstance(given, dict) and given.get("relative") is True:
            given = {"unit": "residual_norm"} | given
        if isinstance(given, dict) and given.get("unit") == "residual_norm":
            return {"tokens": {"from": 1}} | given
        return given

    @model_validator(mode="after")
    def _has_one_unit(self) -> Add:
        if self.relative not in (None, self.unit == "residual_norm"):
            raise ValueError("relative and unit contradict each other: leave out one of them")
        return self


class Scale(_Intervention):
    """factor * x."""

    op: Literal["scale"]
    factor: Number


class Zero(_Intervention):
    """0."""

    op: Literal["zero"]


class ProjectOut(_Intervention):
    """x minus its projection onto the vector."""

    op: Literal["project_out"]
    vector: Vector


class _Limits(_Intervention):
    min: Number | None = None
    max: Number | None = None

    @model_validator(mode="after")
    def _has_room(self) -> Self:
        if self.min is None and self.max is None:
            raise ValueError("give min, max or both")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min {self.min:g} is above max {self.max:g}")
        return self

    @property
    def limits(self) -> tuple[float, float]:
        """Min and max, infinite where one is left out."""
        return -math.inf if self.min is None else self.min, math.inf if self.max is None else self.max


class Clamp(_Limits):
    """x with each entry limited to min and max."""

    op: Literal["clamp"]


class ClampProjection(_Limits):
    """x with its length along the vector, p = x.v / |v|, limited to min and max."""

    op: Literal["clamp_projection"]
    vector: Vector


class Rotate(_Intervention):
    """x with its component in the plane of two directions rotated by an angle in degrees, from the first to the second.

    The rest of x and its norm are kept.
    """

    op: Literal["rotate"]
    vector: Vector
    toward: Vector
    angle: Number


class Ablate(_Intervention):
    """The mean instead of x; with a vector, x with its length along the vector set to that of the mean."""

    op: Literal["ablate"]
    mean: Vector
    vector: Vector | None = None


class StoredRows(_Spec):
    """Rows of a stored run: its tokens, and its point, which is by default the operation's own."""

    run_id: str = Field(min_length=1, max_length=256)
    point: str | None = Field(default=None, min_length=1, max_length=256)
    tokens: TokenChoice = "all"


class Replace(_Intervention):
    """(1 - alpha) * x + alpha * r, where r is the vector, or a row of a stored run."""

    op: Literal["replace"]
    vector: Vector | None = None
    rows: StoredRows | None = Field(default=None, alias="from")
    alpha: Annotated[Number, Field(ge=0, le=1)] = 1.0

    @model_validator(mode="after")
    def _one_of_them(self) -> Replace:
        if (self.vector is None) == (self.rows is None):
            raise ValueError("give either vector or from")
        return self

    @property
    def kind(self) -> Literal["replace", "mix"]:
        """The engine's operation: replacing the whole row copies its bits."""
        return "replace" if self.alpha == 1 else "mix"


class ChangeFeature(_Spec):
    """x + (v - f) * W_dec[feature]: one autoencoder feature changes from f to v; the reconstruction error stays.

    v is f + value for `add`, value * f for `scale`, value for `clamp`, and 0 for `zero`.
    """

    op: Literal["add", "scale", "clamp", "zero"]
    sae: ReadoutName
    feature: int = Field(ge=0)
    value: Number | None = None
    tokens: TokenChoice = "all"
    when: Condition | None = None

    @classmethod
    def _meant(cls, value: dict[Any, Any]) -> frozenset[str]:
        return super()._meant(value) - ({"value"} if value.get("op") == "zero" else set())

    @model_validator(mode="after")
    def _has_its_value(self) -> ChangeFeature:
        if (self.value is None) != (self.op == "zero"):
            raise ValueError("add, scale and clamp need value; zero takes none")
        return self


# Of rows at a point.
Change = Add | Scale | Zero | ProjectOut | Clamp | ClampProjection | Rotate | Ablate | Replace
VECTORS = ("vector", "toward", "mean")  # the fields that hold vectors
# The tags name no field, so that an error's path holds fields alone.
OPERATIONS = ("add", "scale", "zero", "project_out", "clamp", "clamp_projection", "rotate", "ablate", "replace")


def _tag(value: Any) -> str | None:
    op = value.get("op") if isinstance(value, dict) else getattr(value, "op", None)
    if isinstance(value, ChangeFeature) or (isinstance(value, dict) and "sae" in value):
        return "op:feature" if op in OPERATIONS else None
    return f"op:{op}" if op in OPERATIONS else None


Intervention = Annotated[
    Annotated[Add, Tag("op:add")]
    | Annotated[Scale, Tag("op:scale")]
    | Annotated[Zero, Tag("op:zero")]
    | Annotated[ProjectOut, Tag("op:project_out")]
    | Annotated[Clamp, Tag("op:clamp")]
    | Annotated[ClampProjection, Tag("op:clamp_projection")]
    | Annotated[Rotate, Tag("op:rotate")]
    | Annotated[Ablate, Tag("op:ablate")]
    | Annotated[Replace, Tag("op:replace")]
    | Annotated[ChangeFeature, Tag("op:feature")],
    Discriminator(
        _tag,
        custom_error_type="unknown_operation",
        custom_error_message=f"op must be one of {', '.join(OPERATIONS)}",
    ),
]


def _some(variants: list[list[Intervention]]) -> list[list[Intervention]]:
    if not variants:
        raise ValueError("give at least one list of interventions: [] in it is the baseline, variants: [[]]")
    return variants


# None at all is the baseline of an experiment.
Interventions = Annotated[list[Intervention], Field(max_length=256, fail_fast=True)]
Variants = Annotated[
    list[Interventions],
    Field(max_length=64, fail_fast=True, json_schema_extra={"minItems": 1}),
    AfterValidator(_some),
]


def as_sent(interventions: Iterable[Intervention]) -> list[dict[str, Any]]:
    """Interventions as JSON values, in the words of the request."""
    return [spec.model_dump(mode="json", by_alias=True, exclude_unset=True) for spec in interventions]
