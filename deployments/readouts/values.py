"""Computes readouts on rows: one matrix product for all linear readouts of a point, one for each sparse autoencoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn import functional

from deployments.readouts.files import Definition, LensDefinition
from deployments.readouts.spec import ReadoutSpec, needed_point
from deployments.tiles import in_tiles

DENSE_BYTES = 64 << 20  # of an autoencoder's float32 features computed at a time
ENCODERS = ("W_enc", "W_mag", "b_enc", "b_gate", "b_mag", "threshold")  # tensors with a column for each feature
_EPSILON = 1e-5  # in SAELens' layer norm


class Readout:
    """A readout whose tensors are on a device.

    Attributes:
        spec: Its spec.
        count: The number of values of a row.
        hidden: The number of entries of a row that it reads.
        bytes: Memory of its tensors.
        batch_invariant: Whether a row's values have the same bits whatever other rows and readouts are read with it.
    """

    def __init__(self, definition: Definition, device: torch.device, batch_invariant: bool = False) -> None:
        """Prepare the tensors for rows on a device; `batch_invariant` costs some speed."""
        self.batch_invariant = batch_invariant
        self.spec: ReadoutSpec = definition.spec
        self.count, self.hidden = definition.size, definition.hidden
        tensors = definition.tensors
        if self.spec.kind == "linear":
            self._tensors = _folded(tensors, _wide(device))
        else:
            self._tensors = {name: tensor.float() for name, tensor in tensors.items()}
            if self.spec.activation == "gated":
                self._tensors["W_mag"] = self._tensors["W_enc"] * self._tensors.pop("r_mag").exp()
            if self.spec.rescale_acts_by_decoder_norm:
                self._tensors["norms"] = self._tensors["W_dec"].norm(dim=-1)
        self._tensors = {name: tensor.to(device) for name, tensor in self._tensors.items()}
        self.bytes = sum(tensor.nbytes for tensor in self._tensors.values())

    @property
    def weight(self) -> torch.Tensor:
        """For a linear readout, [hidden, count] including standardization and slope."""
        return self._tensors["weight"]

    @property
    def bias(self) -> torch.Tensor:
        """For a linear readout, [count] including standardization and slope."""
        return self._tensors["bias"]

    @property
    def rows_at_once(self) -> int:
        """The number of rows computed at a time."""
        return max(1, DENSE_BYTES // (4 * self.count))

    def column(self, feature: int | None, label: str | None) -> int | None:
        """The index of a value; None if there is no such value, or if several exist and none is named."""
        if label is not None:
            return self.spec.labels.index(label) if self.spec.labels and label in self.spec.labels else None
        if feature is not None:
            return feature if feature < self.count else None
        return 0 if self.count == 1 else None

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Its values for rows [rows, hidden]: [rows, count], in float32."""
        if self.spec.kind == "linear":
            return Stack([self]).values(rows)
        normal, _ = self._normalized(rows.float())
        return self._in_tiles(normal, self.count, self._features)

    def change(self, rows: torch.Tensor, feature: int, kind: str, value: torch.Tensor) -> torch.Tensor:
        """The change of rows [rows, hidden] that gives one feature another value, in float32.

        The kind is to `add` the value [rows] or [1], to `scale` by it, to `clamp` to it, or `zero`.
        """
        normal, scale = self._normalized(rows.float())
        now = self._feature(normal, feature)
        wanted = {"add": now + value, "scale": now * value, "zero": now * 0}.get(kind, value)
        direction = self._tensors["W_dec"][feature]
        if "norms" in self._tensors:
            direction = direction / self._tensors["norms"][feature]
        return (wanted - now)[:, None] * direction / scale

    def _normalized(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The encoder's input rows, and their scale, [rows or 1, 1]."""
        scale = rows.new_ones(1, 1)
        if self.spec.normalize_activations == "constant_norm_rescale":
            scale = self.hidden**0.5 / rows.norm(dim=-1, keepdim=True)
            rows = rows * scale
        elif self.spec.normalize_activations == "layer_norm":
            rows = rows - rows.mean(dim=-1, keepdim=True)
            scale = 1 / (rows.std(dim=-1, keepdim=True) + _EPSILON)
            rows = rows * scale
        return (rows - self._tensors["b_dec"] if self.spec.apply_b_dec_to_input else rows), scale

    def _in_tiles(
        self, rows: torch.Tensor, width: int, encoder: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        return in_tiles(rows, width, encoder) if self.batch_invariant else encoder(rows)

    def _feature(self, rows: torch.Tensor, feature: int) -> torch.Tensor:
        """One feature [rows] of normalized rows; computes all features only if they compete."""
        if self.spec.activation != "topk":
            return self._in_tiles(rows, 1, lambda tile: self._features(tile, slice(feature, feature + 1)))[:, 0]
        parts = torch.split(rows, self.rows_at_once)
        return torch.cat([self._in_tiles(part, self.count, self._features)[:, feature] for part in parts])

    def _features(self, rows: torch.Tensor, columns: slice = slice(None)) -> torch.Tensor:
        """Features [rows, columns] of normalized rows; for `topk`, all columns."""
        held = {name: self._tensors[name][..., columns] for name in ENCODERS if name in self._tensors}
        if self.spec.activation == "gated":
            opened = rows @ held["W_enc"] + held["b_gate"] > 0
            return opened * (rows @ held["W_mag"] + held["b_mag"]).relu_()
        values = torch.addmm(held["b_enc"], rows, held["W_enc"])
        if self.spec.activation == "jumprelu":
            return values.relu_() * (values > held["threshold"])
        if self.spec.activation == "topk":
            return self._largest(values)
        return values.relu_()

    def _largest(self, features: torch.Tensor) -> torch.Tensor:
        """The `k` largest of each row, the others 0; ranked by their contribution if the spec says so."""
        assert self.spec.k is not None
        if "norms" in self._tensors:
            features = features * self._tensors["norms"]
        values, index = features.topk(self.spec.k, dim=-1, sorted=False)
        return torch.zeros_like(features).scatter_(-1, index, values.relu_())


class FittedLens:
    """A fitted lens whose maps are on a device.

    Attributes:
        hidden: The number of entries of a row.
        needs: The point of the last layer that the model must have, since the last layer has no map.
        bytes: Memory of its tensors.
    """

    def __init__(self, definition: LensDefinition, device: torch.device, batch_invariant: bool = False) -> None:
        """Move the maps to a device; `batch_invariant` as of `Readout`."""
        self._tensors = {name: tensor.to(device) for name, tensor in definition.tensors.items()}
        self._batch_invariant = batch_invariant
        self.hidden, self.needs = definition.hidden, needed_point(definition.layers)
        self.bytes = sum(tensor.nbytes for tensor in self._tensors.values())

    def apply(self, layer: int, rows: torch.Tensor) -> torch.Tensor:
        """A layer's rows [rows, hidden] through its map, in float32 and back; unchanged if the layer has none."""
        weight, bias = (self._tensors.get(f"layers.{layer}.{name}") for name in ("weight", "bias"))
        if weight is None:
            return rows

        def product(some: torch.Tensor) -> torch.Tensor:
            return functional.linear(some.float(), weight.float(), None if bias is None else bias.float())

        rows = rows.to(weight.device)
        return in_tiles(rows, self.hidden, product) if self._batch_invariant else product(rows).to(rows.dtype)


def largest(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest of values [rows, all] and their indices, [rows, count] each, in descending order."""
    top = values.topk(count, dim=-1)
    return top.values, top.indices


def _wide(device: torch.device) -> torch.dtype:
    """The dtype of linear maps: some entries are a thousand times the others, and the mean is subtracted again."""
    return torch.float32 if device.type == "mps" else torch.float64


def _folded(tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Fold a linear readout's tensors into one map: weight [hidden, k] and bias [k]."""
    weight = tensors["weight"].double()
    bias = tensors["bias"].double() if "bias" in tensors else weight.new_zeros(len(weight))
    if "mean" in tensors:
        weight = weight / tensors["std"].double()
        bias = bias - weight @ tensors["mean"].double()
    if "slope" in tensors:
        slope = tensors["slope"].double()
        weight, bias = weight * slope[:, None], bias * slope + tensors["offset"].double()
    return {"weight": weight.T.contiguous().to(dtype), "bias": bias.to(dtype)}


class Stack:
    """Concatenated linear readouts of one point.

    Attributes:
        first: The first column of each readout.
        bytes: Memory of their weights.
    """

    def __init__(self, readouts: Sequence[Readout]) -> None:
        self._readouts = readouts
        self._weight = torch.cat([one.weight for one in readouts], dim=1)  # [hidden, all]
        self._bias = torch.cat([one.bias for one in readouts])
        self.bytes = self._weight.nbytes + self._bias.nbytes
        counts = [one.count for one in readouts]
        self.first = {one: sum(counts[:i]) for i, one in enumerate(readouts)}
        kinds = [one.spec.activation for one in readouts for _ in range(one.count)]
        columns = {kind: [i for i, one in enumerate(kinds) if one == kind] for kind in ("sigmoid", "relu")}
        self._columns = {
            kind: slice(None) if len(found) == len(kinds) else found for kind, found in columns.items() if found
        }

    def values(self, rows: torch.Tensor) -> torch.Tensor:
        """Their values for rows [rows, hidden]: [rows, all], in float32."""
        if not any(readout.batch_invariant for readout in self._readouts):
            return self._product(rows)
        if len(self._readouts) > 1:
            return torch.cat([readout.encode(rows) for readout in self._readouts], dim=1)
        return in_tiles(rows.float(), len(self._bias), self._product)

    def _product(self, rows: torch.Tensor) -> torch.Tensor:
        values = torch.addmm(self._bias, rows.to(self._weight.dtype), self._weight)
        for kind, columns in self._columns.items():
            part = values[:, columns]
            values[:, columns] = part.sigmoid() if kind == "sigmoid" else part.relu()
        return values.float()
