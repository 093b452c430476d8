"""Running counts of a census: where large values come, by feature; memory is that of points times features."""

from collections.abc import Callable
from typing import Any

import numpy as np

from evals.outliers.stored import Batch, Stored, largest

Record = dict[str, Any]


class Counts:
    """What was counted so far of values that are large enough.

    Attributes:
        largest: The largest magnitude among them, 0 where there is none, float64 `[points, features]`.
        row: The number of the first row that has it, int64 `[points, features]`.
        beside: What `add` was given beside that row's values, float64 `[points, features]`.
        positions: Rows with one at any point, each once, int64 `[features]`.
        rows: All rows.
        not_finite: Rows that were left out.
    """

    def __init__(self, stored: Stored) -> None:
        """Initialize all counts at 0."""
        shape = len(stored.points), stored.width
        self.stored = stored
        self.largest, self.beside = np.zeros(shape), np.zeros(shape)
        self.row = np.full(shape, -1)
        self.positions = np.zeros(stored.width, dtype=np.int64)
        self.rows = self.not_finite = 0

    def add(self, batch: Batch, least: np.ndarray, beside: np.ndarray | None = None) -> None:
        """Count a batch's values.

        Args:
            batch: The rows, of which none was counted before.
            least: The least magnitude that counts, above 0, float64 `[points, rows]`.
            beside: A number of each row at each point, which is kept with the largest value, `[points, rows]`.
        """
        self.rows += len(batch.rows)
        self.not_finite += batch.not_finite
        counts = np.zeros((len(batch.rows), self.stored.width), dtype=bool)
        for point in np.flatnonzero((batch.tops >= least).any(axis=1)):
            columns = np.flatnonzero(largest(batch.values[point], 0) >= least[point].min())
            magnitudes = batch.values[point][:, columns].double().abs().numpy()
            large = magnitudes >= least[point][:, None]  # [rows, columns]
            counts[:, columns] |= large
            magnitudes[~large] = 0
            row = magnitudes.argmax(axis=0)
            top = magnitudes[row, np.arange(len(columns))]
            better = top > self.largest[point, columns]
            row, columns = row[better], columns[better]
            self.largest[point, columns], self.row[point, columns] = top[better], batch.rows[row]
            if beside is not None:
                self.beside[point, columns] = beside[point, row]
        self.positions += counts.sum(axis=0)

    @property
    def layers(self) -> np.ndarray:
        """The layers that were recorded, ascending."""
        return np.unique(self.stored.layer)

    def largest_by_layer(self) -> np.ndarray:
        """`largest` over all points of a layer, float64 `[layers, features]`."""
        return np.stack([self.largest[self.stored.layer == layer].max(axis=0) for layer in self.layers])

    def records(self, features: np.ndarray, more: Callable[[int, int], Record] = lambda *_: {}) -> list[Record]:
        """What is said of features, those at the most positions first.

        Args:
            features: Which, int64 `[features]`.
            more: What else, by the point and feature of the largest value.
        """
        layers = self.largest_by_layer() > 0
        order = sorted(features.tolist(), key=lambda f: (-self.positions[f], -self.largest[:, f].max(), f))
        at = {feature: int(self.largest[:, feature].argmax()) for feature in order}
        rows = np.unique([self.row[point, feature] for feature, point in at.items()]).astype(np.int64)
        where = {row: rest for row, *rest in self.stored.look_up(rows)}
        found = []
        for feature, point in at.items():
            run_id, position, token_id = where[int(self.row[point, feature])]
            place = {"point": self.stored.points[point], "run_id": run_id, "position": position, "token_id": token_id}
            found.append(
                {
                    "feature": feature,
                    "layers": self.layers[layers[:, feature]].tolist(),
                    "positions": int(self.positions[feature]) / self.rows,
                    "largest": float(self.largest[point, feature]),
                    **more(point, feature),
                    "where": place,
                }
            )
        return found
