"""Collected activations, directions between them, and steering along directions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vitrine.points import layer_of, listed


class _AtPoints:
    points: list[str]

    @property
    def layers(self) -> list[int | None]:
        """The layer number of each point; None for a point outside the layers."""
        return [layer_of(point) for point in self.points]


@dataclass(frozen=True, repr=False)
class Activations(_AtPoints):
    """The activations of a list of prompts, in the list's order.

    Attributes:
        values: float32 `[prompts, points, hidden]` if one token of each prompt was collected; otherwise a list with
            `[tokens, points, hidden]` for each prompt. At heads, `hidden` is `heads, head_dim`.
        points: The points' names, in the order in which they were asked for; the layers of one name ascend.
        run_ids: The stored run of each prompt.
        session: The session of the runs.
        texts: The prompts as given.
        labels: The label of each prompt; None without labels.
        tags: The tags of each run, with its label.

    Examples:
        >>> acts = server.collect(["Ann has", "Tom has"], "layers.*.output", labels=[0, 1])
        >>> acts.values.shape, acts.layers, acts.labels
        ((2, 6, 192), [0, 1, 2, 3, 4, 5], array([0, 1]))
    """

    values: npt.NDArray[np.float32] | list[npt.NDArray[np.float32]]
    points: list[str]
    run_ids: list[str]
    session: str
    texts: Sequence[Any]
    labels: npt.NDArray[Any] | None = None
    tags: Sequence[Mapping[str, str]] = ()

    def __len__(self) -> int:
        return len(self.run_ids)

    def __repr__(self) -> str:
        shape = list(self.values.shape) if isinstance(self.values, np.ndarray) else f"{len(self)} arrays"
        return f"Activations({shape}, {len(self.points)} points, session={self.session!r})"


@dataclass(frozen=True, eq=False)
class Steer:
    """A vector that is added to a point's activations during generation: `direction.at(2) * 1.5`.

    Attributes:
        point: The point's name.
        vector: `[hidden]`; at heads, `[heads, head_dim]`.
        scale: The factor of the vector.
        tokens: The tokens that it is added to, as in `docs/concepts.md`. None means all; with `residual_norm`, all but
            the first, whose norm is often a hundred times as large.
        unit: `absolute`, or `residual_norm`: the vector is scaled to the norm of each changed activation.

    Examples:
        >>> acts = server.collect(["Ann has 3", "Tom ran"], "layers.*.output", labels=[1, 0])
        >>> steer = vitrine.difference_of_means(acts).at(3)
        >>> (steer * -2).scale, (-steer).scale, steer.point
        (-2.0, -1.0, 'layers.3.output')
    """

    point: str
    vector: npt.NDArray[np.float32]
    scale: float = 1.0
    tokens: str | Mapping[str, Any] | None = None
    unit: str = "absolute"

    def __mul__(self, factor: float) -> Steer:
        return replace(self, scale=self.scale * float(factor))

    __rmul__ = __mul__

    def __neg__(self) -> Steer:
        return self * -1

    def __repr__(self) -> str:
        tokens = "" if self.tokens is None else f", tokens={self.tokens!r}"
        unit = "" if self.unit == "absolute" else f", unit={self.unit!r}"
        return f"Steer({self.point!r}, scale={self.scale:g}{tokens}{unit})"

    @property
    def operation(self) -> dict[str, Any]:
        """The intervention in the format of requests.

        Examples:
            >>> acts = server.collect(["Ann has 3", "Tom ran"], "layers.3.output", labels=[1, 0])
            >>> steer = vitrine.difference_of_means(acts).at(3) * 2
            >>> steer.operation["op"], steer.operation["point"], steer.operation["scale"]
            ('add', 'layers.3.output', 2.0)
        """
        return self._operation("add", scale=self.scale, unit=self.unit)

    def cap(self, max: float | None = None, min: float | None = None) -> dict[str, Any]:
        """The intervention that limits each activation's length along the vector, x.v / |v|, for `interventions=[...]`.

        Args:
            max: The most; None for no limit.
            min: The least; None for no limit.

        Examples:
            >>> acts = server.collect(["Ann has 3", "Tom ran"], "layers.3.output", labels=[1, 0])
            >>> capped = vitrine.difference_of_means(acts).at(3).cap(max=0.5)
            >>> server.generate("Tom has", max_tokens=4, interventions=[capped]) != ""
            True
        """
        return self._operation("clamp_projection", min=min, max=max)

    def _operation(self, op: str, **fields: Any) -> dict[str, Any]:
        tokens = {} if self.tokens is None else {"tokens": self.tokens}
        return {"op": op, "point": self.point, "vector": self.vector.ravel().tolist(), **fields, **tokens}


@dataclass(frozen=True, eq=False)
class Direction(_AtPoints):
    """A vector for each of several points, usually one for each layer.

    Attributes:
        values: `[points, hidden]`, float32.
        points: The points' names.

    Examples:
        >>> acts = server.collect(["Ann has 3", "Tom ran"], "layers.*.output", labels=[1, 0])
        >>> direction = vitrine.difference_of_means(acts)
        >>> direction.values.shape, direction.at(-1)
        ((6, 192), Steer('layers.5.output', scale=1))
        >>> direction.save("direction.safetensors")
        >>> bool((vitrine.Direction.load("direction.safetensors").values == direction.values).all())
        True
    """

    values: npt.NDArray[np.float32]
    points: list[str]

    def at(self, layer: int, unit: str = "absolute", tokens: str | Mapping[str, Any] | None = None) -> Steer:
        """Steering with the vector of one layer.

        Args:
            layer: The layer's number; -1 is the direction's last layer.
            unit: See `Steer`.
            tokens: See `Steer`.

        Raises:
            IndexError: The direction has no such layer, or several points in this layer.

        Examples:
            >>> acts = server.collect(["Ann has 3", "Tom ran"], "resid_post", labels=[1, 0])
            >>> vitrine.difference_of_means(acts).at(-1, unit="residual_norm") * 0.5
            Steer('layers.5.output', scale=0.5, unit='residual_norm')
        """
        layers = self.layers
        wanted = sorted({own for own in layers if own is not None})[layer] if -len(layers) <= layer < 0 else layer
        if layers.count(wanted) != 1:
            count = layers.count(wanted)
            raise IndexError(f"layer {layer}: the direction has {count} points there, of {listed(self.points)}")
        place = layers.index(wanted)
        return Steer(self.points[place], self.values[place], tokens=tokens, unit=unit)

    def save(self, path: str | Path) -> None:
        """Write a safetensors file with a tensor for each point, named as the point.

        With up to 64 points it is also a tensor file of the server, docs/http.md, whose tensors interventions name.

        Examples:
            >>> acts = server.collect(["Ann has 3", "Tom ran"], "resid_post", labels=[1, 0])
            >>> vitrine.difference_of_means(acts).save("direction.safetensors")
        """
        from safetensors.numpy import save_file

        vectors = {point: np.ascontiguousarray(row) for point, row in zip(self.points, self.values, strict=True)}
        save_file(vectors, path, {"points": json.dumps(self.points)})

    @classmethod
    def load(cls, path: str | Path) -> Direction:
        """Read a file of `save`.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: The file is not from `save`.

        Examples:
            >>> acts = server.collect(["Ann has 3", "Tom ran"], "layers.3.output", labels=[1, 0])
            >>> vitrine.difference_of_means(acts).save("direction.safetensors")
            >>> vitrine.Direction.load("direction.safetensors").points
            ['layers.3.output']
        """
        from safetensors import safe_open

        with safe_open(path, "numpy") as file:
            points = json.loads((file.metadata() or {}).get("points", "[]"))
            if not points or {*points} != {*file.keys()}:
                raise ValueError(f"{path} was not written by Direction.save")
            return cls(np.stack([file.get_tensor(point) for point in points]), points)


def difference_of_means(acts: Activations, positive: Any = 1) -> Direction:
    """The mean of the activations with one label minus the mean of all others, at each point.

    Args:
        acts: Activations of one token for each prompt, with labels.
        positive: The label of the first mean.

    Raises:
        ValueError: There are no labels or several tokens per prompt, or one side has no activations.

    Examples:
        >>> acts = server.collect(["Ann has 3", "Tom ran"], "layers.*.output", labels=["sum", "story"])
        >>> vitrine.difference_of_means(acts, positive="sum").values.shape
        (6, 192)
    """
    if acts.labels is None:
        raise ValueError("the activations have no labels: collect(..., labels=[...])")
    if not isinstance(acts.values, np.ndarray):
        raise ValueError("the activations are of several tokens a prompt: collect(..., tokens='prompt_last') for one")
    chosen = acts.labels == positive
    if chosen.all() or not chosen.any():
        labels = list(map(repr, dict.fromkeys(acts.labels.tolist())))
        hint = f"; choose positive= from {', '.join(labels)}" if len(labels) > 1 else ""
        count = f"{int(chosen.sum())} of {len(acts)} labels are {positive!r}"
        raise ValueError(f"{count}: both sides need activations{hint}")
    means = [acts.values[side].mean(axis=0, dtype=np.float64) for side in (chosen, ~chosen)]
    return Direction((means[0] - means[1]).astype(np.float32), list(acts.points))


def operations(
    steer: Steer | Sequence[Steer] | None, interventions: Iterable[Mapping[str, Any]] | None
) -> list[Mapping[str, Any]] | None:
    """A request's `interventions`: the given ones, then the steering; None if there are none."""
    steers = [steer] if isinstance(steer, Steer) else [] if steer is None else list(steer)
    if any(not isinstance(each, Steer) for each in steers):
        raise TypeError("steer: give direction.at(layer) * scale, or a list of them; a vector alone names no point")
    return [*(interventions or ()), *(each.operation for each in steers)] or None
