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
        values: float32 `[prompts, points, hidden]` if one token of each prompt was collected; otherwise a list with
            `[tokens, points, hidden]` for each prompt. At heads, `hidden` is `heads, head_dim`.
        points: The points' names, in the order of execution.
        run_ids: The stored run of each prompt.
        session: The session of the runs.
        texts: The prompts as given.
        labels: The label of each prompt; None without labels.

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
        """The layer number of each point; None for a point outside the layers.

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
