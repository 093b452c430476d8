"""Attention patterns of a prompt."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vitrine.experiments.patching import PatchGridMethods
from vitrine.experiments.plots import heat_map, shown
from vitrine.experiments.prompt_batches import Prompt, check_one


@dataclass(frozen=True, repr=False)
class Attention:
    """The attention pattern of a prompt in one layer.

    Attributes:
        layer: The layer.
        values: `[heads, tokens, tokens]`: the attention of head h from token i to token j; 0 for j > i.
        tokens: The prompt's tokens.

    Examples:
        >>> attention = server.attention("Ann has 3 boxes", layer=2)
        >>> round(float(attention.values[0].sum(-1).min()), 2)
        1.0
    """

    layer: int
    values: npt.NDArray[np.float32]
    tokens: list[str]

    def plot(self, head: int | None = None, path: str | Path | None = None) -> Any:
        """A heat map of one head, or of the mean over heads; raises ImportError without matplotlib.

        Examples:
            >>> figure = server.attention("Ann has 3 boxes", layer=2).plot(head=1, path="attention.png")
        """
        values = self.values.mean(axis=0) if head is None else self.values[head]
        names = [shown(token) for token in self.tokens]
        which = "mean of the heads" if head is None else f"head {head}"
        title, labels = f"attention in layer {self.layer}, {which}", ("attends to", "token")
        return heat_map(values[::-1], names[::-1], names, title=title, labels=labels, path=path)

    def __repr__(self) -> str:
        return f"Attention(layer={self.layer}, {len(self.values)} heads, {len(self.tokens)} tokens)"


class AttentionMethods(PatchGridMethods):
    """The part of `Server` that returns attention patterns."""

    async def attention(self, prompt: Prompt, layer: int) -> Attention:
        """The attention pattern of a prompt in one layer; it is also stored.

        Args:
            prompt: A text or a chat.
            layer: The layer's number; -1 is the last.

        Raises:
            ServerError: The server rejects the request, for example because the model's attention has no patterns.

        Examples:
            >>> attention = server.attention("Ann has 3 boxes", layer=-1)
            >>> attention.layer, attention.values.shape[1:] == (len(attention.tokens), len(attention.tokens))
            (5, True)
        """
        check_one(prompt, "prompt")
        capture = {"points": [f"layers.{layer}.attention.weights"], "mode": "trace", "required": True}
        asked = self.complete(prompt, capture=capture, max_tokens=0)
        answer, tokens = await asyncio.gather(asked, self.tokens(prompt))
        (run,) = await self.load_runs(answer)
        ((point, rows),) = run.items()
        values = np.zeros((len(rows[0]), len(rows), len(rows)), np.float32)
        for place, row in enumerate(rows):
            values[:, place, : row.shape[1]] = row
        return Attention(int(point.split(".")[1]), values, tokens)
