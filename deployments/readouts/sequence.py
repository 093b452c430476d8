"""The values of a sequence's readouts: those not sent yet, and columns beside recorded rows."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from deployments.points.token_choices import Tokens
from deployments.readouts.gates import Source
from deployments.readouts.spec import COLUMN, ReadoutRows


class ResolvedReadout(NamedTuple):
    """A readout that a request asks for, found on the server."""

    source: Source
    tokens: Tokens  # to compute it for
    top_k: int | None = None  # for an autoencoder, how many features of each token to return

    @property
    def width(self) -> int:
        """How many values a row has."""
        count = self.source.readout.count
        return min(self.top_k, count) if self.top_k else count


class Values(NamedTuple):
    """Values of consecutive rows: [rows, count], or [rows, top] of features with their indices."""

    values: np.ndarray
    features: np.ndarray | None = None


class SequenceReadouts:
    """The values of a sequence's readouts so far.

    Attributes:
        asked: The readouts.
        known: For each of them, the first row that was not read yet.
    """

    def __init__(self, asked: Sequence[ResolvedReadout], prompt: int) -> None:
        """No values yet; `prompt` is the number of prompt tokens."""
        self.asked, self._prompt = asked, prompt
        self._parts = [[_no_rows(readout)] for readout in self.asked]
        self.known = [readout.tokens.first for readout in self.asked]
        self._returned = [readout.tokens.first for readout in self.asked]

    @property
    def wants_generated(self) -> bool:
        """Whether rows of generated tokens are wanted; the last one then runs through the model, too."""
        return any(readout.tokens.stop is None or readout.tokens.stop > self._prompt for readout in self.asked)

    def add(self, index: int, first: int, values: Values) -> None:
        """Add rows of one readout, the first of them at position `first`."""
        self._parts[index].append(values)
        self.known[index] = first + len(values.values)

    def take(self, ended: bool = False) -> tuple[ReadoutRows, ...]:
        """The rows that were not returned yet; those of a readout for the last rows are returned at the end."""
        rows = []
        for index, readout in enumerate(self.asked):
            if (readout.tokens.tail and not ended) or self._returned[index] >= self.known[index]:
                continue
            positions = readout.tokens.within(self._returned[index], self.known[index])
            if readout.tokens.tail:
                positions = positions[-readout.tokens.tail :]
            self._returned[index] = self.known[index]
            cut = bisect_left(positions, self._prompt)
            for part, begin in ((positions[:cut], 0), (positions[cut:], self._prompt)):
                if len(part):
                    rows.append(self._rows(index, part, begin))
        return tuple(rows)

    def columns(self, positions: Sequence[int]) -> dict[str, torch.Tensor]:
        """The values at some positions as columns of a recorded run; NaN if a readout has none."""
        tensors = {}
        for index, readout in enumerate(self.asked):
            column = self._column(index, positions)
            name = f"{COLUMN}{readout.source.name}"
            tensors[name] = torch.from_numpy(column.values)
            if column.features is not None:
                tensors[f"{name}.features"] = torch.from_numpy(column.features)
        return tensors

    def _column(self, index: int, positions: Sequence[int]) -> Values:
        """The rows at some positions: NaN if a row is missing, and index -1 for a feature whose value is 0."""
        readout, (values, features) = self.asked[index], self._all(index)
        first = readout.tokens.first
        wanted = set(readout.tokens.of(self.known[index]))
        shape = (len(positions), values.shape[1])
        padded = np.full(shape, np.nan, np.float32), np.full(shape, -1, np.int32)
        rows = [i for i, position in enumerate(positions) if position in wanted]
        at = [positions[i] - first for i in rows]
        padded[0][rows] = values[at]
        if features is not None:
            padded[1][rows] = np.where(values[at] == 0, -1, features[at])  # the index of a zero value has no meaning
        return Values(padded[0], None if features is None else padded[1])

    def _rows(self, index: int, positions: Sequence[int], begin: int) -> ReadoutRows:
        """The rows at some positions, all of the prompt or all of the answer, which begins at `begin`."""
        source, tokens, _ = self.asked[index]
        values, features = self._all(index)
        at, labels = [position - tokens.first for position in positions], source.readout.spec.labels
        return ReadoutRows(
            source.name,
            tuple(labels) if labels else None,
            begin > 0,
            [position - begin for position in positions],
            values[at].tolist(),
            None if features is None else features[at].tolist(),
        )

    def _all(self, index: int) -> Values:
        parts = self._parts[index]
        if len(parts) > 1:
            values = np.concatenate([part.values for part in parts])
            features = [part.features for part in parts if part.features is not None]
            self._parts[index] = parts = [Values(values, np.concatenate(features) if features else None)]
        return parts[0]


def _no_rows(readout: ResolvedReadout) -> Values:
    values = np.zeros((0, readout.width), np.float32)
    return Values(values, values.astype(np.int32) if readout.top_k else None)
