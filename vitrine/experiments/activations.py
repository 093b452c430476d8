"""The result of `Server.collect`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vitrine.points import layer_of


@dataclass(frozen=True, repr=False)
class Activations:
    """The activations of a list of prompts, in the list's order.

    Attributes:
        values: `[prompts, points, hidden]` where one token of each prompt was collected; else a list with, for each
            prompt, `[tokens, points, hidden]`. float32. At heads, `hidden` is `heads, head_dim`.
        points: The points' names, in the order in which the model reaches them.
        run_ids: By prompt, the stored run.
        session: The session that holds the runs.
        texts: The prompts, as they were given.
        labels: By prompt, its label; None where none were given.

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

    @property
    def layers(self) -> list[int | None]:
        """By point, the number of its layer; None where it is in none.

        Examples:
            >>> server.collect(["Ann has"], ["embed.output", "layers.2.output"]).layers
            [None, 2]
        """
        return [layer_of(point) for point in self.points]

    def __len__(self) -> int:
        return len(self.run_ids)

    def __repr__(self) -> str:
        shape = list(self.values.shape) if isinstance(self.values, np.ndarray) else f"{len(self)} arrays"
        return f"Activations({shape}, {len(self.points)} points, session={self.session!r})"
