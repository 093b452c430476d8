"""Steered conditions: the interventions of a run, as they are or for each layer and scale of a sweep.

A steered condition is a variant of its own, named after the variant whose prompt it has: `control_layer8_scale-4`.
"""

import json
from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

from evals.config import Config, scaled_field

LAYER = "{layer}"  # what a sweep's layer takes the place of, in points and tensors' names


class Cell(NamedTuple):
    """One condition of a variant: with which layer and scale; neither where nothing is swept."""

    variant: str
    name: str
    layer: int | None
    scale: float | None


def layers(config: Config) -> list[int | None]:
    """The layers of a sweep; None alone where none are swept."""
    return [int(layer) for layer in config.sweep.get("layer", ())] or [None]


def cells(config: Config) -> Iterator[Cell]:
    """The steered conditions: each variant with the interventions, for each layer and scale."""
    variants = config.variants if config.interventions else ()
    swept = (scale for scale in config.sweep.get("scale", ()) if scale or not config.plain_at_zero)
    scales: list[float | None] = [*swept] or [None]
    for variant, layer, scale in product(variants, layers(config), scales):
        parts = [] if layer is None else [f"layer{layer}"]
        parts += [] if scale is None else [f"scale{scale:g}"]
        name = "_".join([variant, *(parts or ["steered"])])
        yield Cell(variant, name.replace(".", "p").replace("+", ""), layer, scale)


def asked(config: Config) -> tuple[str, ...]:
    """The names of all that is asked of a problem in one mode: the variants, then what is steered."""
    return (*config.variants, *(cell.name for cell in cells(config)))


def find(config: Config, name: str) -> tuple[str, list[dict[str, Any]]]:
    """The variant whose prompt a condition has, and its interventions, none of a variant itself."""
    cell = next((cell for cell in cells(config) if cell.name == name), None)
    return (
        (cell.variant, [_filled(intervention, cell) for intervention in config.interventions]) if cell else (name, [])
    )


def _filled(intervention: dict[str, Any], cell: Cell) -> dict[str, Any]:
    text = json.dumps(intervention)
    filled: dict[str, Any] = json.loads(text if cell.layer is None else text.replace(LAYER, str(cell.layer)))
    if cell.scale is not None and (field := scaled_field(intervention)):
        filled[field] = cell.scale
    return filled
