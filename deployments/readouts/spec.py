"""Readouts as data: their definition, the request's fields that name them, and rows of values. It imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, JsonValue, model_validator

from deployments.conditions import ReadoutName
from deployments.points.strict import Strict
from deployments.points.token_choices import TokenChoice

MOST_READOUTS = 64  # of a request
MOST_FEATURES = 1024  # of one token
DEFAULT_TOP_K = 10
COLUMN = "readouts."  # prefix of a stored column's name

Activation = Literal["none", "sigmoid", "relu", "jumprelu", "topk", "gated"]
Normalization = Literal["none", "layer_norm", "constant_norm_rescale"]
LINEAR = ("none", "sigmoid", "relu")
SAE = ("relu", "jumprelu", "topk", "gated")


class ReadoutSpec(Strict):
    """The description of a readout, without its tensors.

    Attributes:
        name: Its name in requests.
        model: The model that it is for.
        point: The point whose rows it reads.
        kind: A linear map of a row, or the encoder of a sparse autoencoder.
        activation: The function applied to the map's values; `gated` for a gated autoencoder.
        labels: For a linear readout, the names of its values, in order.
        description: Any text.
        k: For `topk`, the most features of a row.
        apply_b_dec_to_input: For an autoencoder, whether `b_dec` is subtracted from the row first.
        normalize_activations: For an autoencoder, how the row is normalized before that.
        rescale_acts_by_decoder_norm: For `topk`, whether features are chosen and returned scaled by their decoder norm.
    """

    model_config = ConfigDict(frozen=True)

    name: ReadoutName
    model: str = Field(min_length=1, max_length=256)
    point: str = Field(min_length=1, max_length=256)
    kind: Literal["linear", "sae"]
    activation: Activation = "none"
    labels: list[Annotated[str, Field(min_length=1, max_length=256)]] | None = Field(
        default=None, min_length=1, max_length=1024, fail_fast=True
    )
    description: str | None = Field(default=None, max_length=1024)
    k: int | None = Field(default=None, ge=1, le=1 << 20)
    apply_b_dec_to_input: bool = False
    normalize_activations: Normalization = "none"
    rescale_acts_by_decoder_norm: bool = False

    @model_validator(mode="after")
    def _has_what_its_kind_has(self) -> ReadoutSpec:
        allowed = LINEAR if self.kind == "linear" else SAE
        if self.activation not in allowed:
            raise ValueError(f"activation must be one of {', '.join(allowed)} for the kind {self.kind}")
        if (self.k is None) == (self.activation == "topk"):
            raise ValueError("the activation topk needs k; no other takes it")
        if self.labels is not None and self.kind == "sae":
            raise ValueError("labels: an autoencoder's features are named by their index, so leave labels out")
        if self.labels is not None and len(set(self.labels)) < len(self.labels):
            raise ValueError("labels must differ from each other")
        if self.kind == "linear" and (self.apply_b_dec_to_input or self.normalize_activations != "none"):
            raise ValueError("apply_b_dec_to_input and normalize_activations are allowed only for autoencoders")
        if self.rescale_acts_by_decoder_norm and self.activation != "topk":
            raise ValueError("rescale_acts_by_decoder_norm needs the activation topk")
        return self


class LensSpec(Strict):
    """What a fitted lens is.

    Attributes:
        name: Its name in requests.
        model: The id of the served model that it is for.
        kind: How it was fitted.
        description: Any text.
        card: How it was fitted in detail, and its losses, as `evals.lenses` writes them.
    """

    model_config = ConfigDict(frozen=True)

    name: ReadoutName
    model: str = Field(min_length=1, max_length=256)
    kind: Literal["jacobian", "tuned"]
    description: str | None = Field(default=None, max_length=1024)
    card: dict[str, JsonValue] = {}


def needed_point(layers: Sequence[int]) -> str:
    """The point that a model must have for a lens with maps of these layers, because its last layer has no map."""
    return f"layers.{layers[-1] + 1}.output"


class AskedReadout(Strict):
    """A readout whose values a request asks for.

    Attributes:
        name: Its name.
        tokens: The tokens to compute it for.
        top_k: For an autoencoder, how many features of a token are returned, the largest first.
        store: Whether the values are columns of the stored run. If the request captures, they always are.
    """

    model_config = ConfigDict(frozen=True)

    name: ReadoutName
    tokens: TokenChoice = "all"
    top_k: int | None = Field(default=None, ge=1, le=MOST_FEATURES)
    store: bool = False


def _named(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


def _once(asked: list[AskedReadout]) -> list[AskedReadout]:
    if len({readout.name for readout in asked}) < len(asked):
        raise ValueError("name each readout only once")
    return asked


AskedReadouts = Annotated[
    list[Annotated[AskedReadout, BeforeValidator(_named, json_schema_input_type=ReadoutName | AskedReadout)]],
    Field(max_length=MOST_READOUTS, fail_fast=True),
    AfterValidator(_once),
]


@dataclass(frozen=True)
class ReadoutRows:
    """Rows of a readout, all of the prompt's tokens or all of generated ones."""

    name: str
    labels: tuple[str, ...] | None  # of its values, if they have any
    generated: bool  # whether the tokens are generated ones
    index: list[int]  # each row's token, by its index among the prompt's or the generated tokens
    values: list[list[float]]  # of each row; for an autoencoder, those of `features`
    features: list[list[int]] | None = None  # of each row, the largest value first; None for a linear readout
