"""Computes readouts on rows: one matrix product for all linear readouts of a point, one for each sparse autoencoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

import torch

from deployments.points.readouts import ReadoutSpec
from deployments.readouts.checks import Definition
from deployments.tiles import in_tiles

DENSE_BYTES = 64 << 20  # of an autoencoder's features, as float32, that are made at a time
ENCODERS = ("W_enc", "W_mag", "b_enc", "b_gate", "b_mag", "threshold")  # tensors with a column for each feature
_EPSILON = 1e-5  # of SAELens' layer norm


class Readout:
    """A readout whose tensors are on a device.

    Attributes:
        spec: What it is.
        count: How many values it gives of a row.
        hidden: Entries of a row that it reads.
        bytes: Memory that its tensors take, of a linear readout also for a copy in stacks.
        batch_invariant: Whether a row's values have the same bits whatever other rows and readouts are read with it.
    """

    def __init__(self, definition: Definition, device: torch.device, batch_invariant: bool = False) -> None:
        """Lay out the tensors.

        Args:
            definition: The readout.
            device: Where rows come from.
            batch_invariant: Give a row's values the same bits in any batch, at some cost in speed.
        """
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
        copies = 2 if self.spec.kind == "linear" else 1
        self.bytes = copies * sum(tensor.nbytes for tensor in self._tensors.values())

    @property
    def weight(self) -> torch.Tensor:
        """Of a linear readout, [hidden, count] with standardization and slope folded in."""
        return self._tensors["weight"]

    @property
    def bias(self) -> torch.Tensor:
        """Of a linear readout, [count] likewise."""
        return self._tensors["bias"]

    @property
    def rows_at_once(self) -> int:
        """Rows whose values are made at a time."""
        return max(1, DENSE_BYTES // (4 * self.count))

    def column(self, feature: int | None, label: str | None) -> int | None:
        """Which of its values is meant; None where there is none, or several and none is named."""
        if label is not None:
            return self.spec.labels.index(label) if self.spec.labels and label in self.spec.labels else None
        if feature is not None:
            return feature if feature < self.count else None
        return 0 if self.count == 1 else None

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Its values of rows [rows, hidden]: [rows, count], in float32."""
        if self.spec.kind == "linear":
            return Stack([self]).values(rows)
        normal, _ = self._normalized(rows.float())
        return self._in_tiles(normal, self.count, self._features)

    def change(self, rows: torch.Tensor, feature: int, kind: str, value: torch.Tensor) -> torch.Tensor:
        """What to add to rows [rows, hidden] so that one feature becomes another value, in float32.

        Args:
            rows: The rows.
            feature: Which.
            kind: `add` to it, `scale` it, or put the value in its place: `clamp`; `zero` puts 0.
            value: The number, [rows] or [1].
        """
        normal, scale = self._normalized(rows.float())
        now = self._feature(normal, feature)
        wanted = {"add": now + value, "scale": now * value, "zero": now * 0}.get(kind, value)
        direction = self._tensors["W_dec"][feature]
        if "norms" in self._tensors:
            direction = direction / self._tensors["norms"][feature]
        return (wanted - now)[:, None] * direction / scale

    def _normalized(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows as the encoder reads them, and by what they were multiplied, [rows or 1, 1]."""
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
        """One feature [rows] of normalized rows; of all features only where they compete."""
        if self.spec.activation != "topk":
            return self._in_tiles(rows, 1, lambda tile: self._features(tile, slice(feature, feature + 1)))[:, 0]
        parts = torch.split(rows, self.rows_at_once)
        return torch.cat([self._in_tiles(part, self.count, self._features)[:, feature] for part in parts])

    def _features(self, rows: torch.Tensor, columns: slice = slice(None)) -> torch.Tensor:
        """Features [rows, columns] of normalized rows; of `topk`, all columns."""
        held = {name: self._tensors[name][..., columns] for name in ENCODERS if name in self._tensors}
        if self.spec.activation == "gated":
            opened = rows @ held["W_enc"] + held["b_gate"] > 0
            return opened * (rows @ held["W_mag"] + held["b_mag"]).relu_()
        found = torch.addmm(held["b_enc"], rows, held["W_enc"])
        if self.spec.activation == "jumprelu":
            return found.relu_() * (found > held["threshold"])
        if self.spec.activation == "topk":
            return self._largest(found)
        return found.relu_()

    def _largest(self, found: torch.Tensor) -> torch.Tensor:
        """The `k` largest of each row, the others 0; ranked by their contribution if the spec says so."""
        assert self.spec.k is not None
        if "norms" in self._tensors:
            found = found * self._tensors["norms"]
        values, index = found.topk(self.spec.k, dim=-1, sorted=False)
        return torch.zeros_like(found).scatter_(-1, index, values.relu_())


def largest(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest of values [rows, all] and their numbers, [rows, count] each, in descending order."""
    top = values.topk(count, dim=-1)
    return top.values, top.indices


def _wide(device: torch.device) -> torch.dtype:
    """The dtype of linear maps: rows have entries a thousand times the others', which a mean takes off again."""
    return torch.float32 if device.type == "mps" else torch.float64


def _folded(tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """A linear readout's tensors as one map: weight [hidden, k] and bias [k]."""
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
    """Linear readouts of one point, side by side, as long as somebody else holds them.

    Attributes:
        first: Each one's first column.
        bytes: Memory that it takes beside theirs: a copy of several ones' tensors.
    """

    def __init__(self, readouts: Sequence[Readout]) -> None:
        counts = [one.count for one in readouts]
        self.first = WeakKeyDictionary({one: sum(counts[:i]) for i, one in enumerate(readouts)})
        self._batch_invariant = any(one.batch_invariant for one in readouts)
        self.bytes = 0
        if len(readouts) == 1:
            self._weight, self._bias = readouts[0].weight, readouts[0].bias
        elif not self._batch_invariant:
            self._weight = torch.cat([one.weight for one in readouts], dim=1)  # [hidden, all]
            self._bias = torch.cat([one.bias for one in readouts])
            self.bytes = self._weight.nbytes + self._bias.nbytes
        kinds = [one.spec.activation for one in readouts for _ in range(one.count)]
        columns = {kind: [i for i, one in enumerate(kinds) if one == kind] for kind in ("sigmoid", "relu")}
        self._columns = {
            kind: slice(None) if len(found) == len(kinds) else found for kind, found in columns.items() if found
        }

    def values(self, rows: torch.Tensor) -> torch.Tensor:
        """Their values of rows [rows, hidden]: [rows, all], in float32."""
        if not self._batch_invariant:
            return self._product(rows)
        if len(self.first) > 1:
            return torch.cat([one.encode(rows) for one in self.first], dim=1)
        return in_tiles(rows.float(), len(self._bias), self._product)

    def _product(self, rows: torch.Tensor) -> torch.Tensor:
        found = torch.addmm(self._bias, rows.to(self._weight.dtype), self._weight)
        for kind, columns in self._columns.items():
            part = found[:, columns]
            found[:, columns] = part.sigmoid() if kind == "sigmoid" else part.relu()
        return found.float()
