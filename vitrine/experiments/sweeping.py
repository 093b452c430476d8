"""Steering sweeps over layers and scales."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitrine.experiments.directions import Direction
from vitrine.experiments.generating import GenerateMethods, text_of
from vitrine.experiments.plots import heat_map
from vitrine.experiments.prompt_batches import Prompt, check, is_chat
from vitrine.points import layer_of


class Steered(NamedTuple):
    """One text of a sweep; `prompt` is the index of its prompt."""

    layer: int
    scale: float
    text: str
    score: float | None
    prompt: int = 0


@dataclass(frozen=True, repr=False)
class Sweep:
    """The generated texts with a direction added at several layers with several scales.

    Attributes:
        rows: The texts by prompt, then by layer, then by scale.

    Examples:
        >>> acts = server.collect(["Ann has 3", "Tom ran"], "resid_post", labels=[1, 0])
        >>> direction = vitrine.difference_of_means(acts)
        >>> sweep = server.sweep("Ann", direction, layers=[2], scales=[0, 1], max_tokens=4, score=len)
        >>> [(row.layer, row.scale) for row in sweep.rows]
        [(2, 0), (2, 1)]
    """

    rows: list[Steered]

    def plot(self, path: str | Path | None = None) -> Any:
        """A heat map of the scores, each the mean over the prompts.

        Raises:
            ValueError: The texts have no scores.
            ImportError: matplotlib is not installed.

        Examples:
            >>> acts = server.collect(["Ann has 3", "Tom ran"], "resid_post", labels=[1, 0])
            >>> direction = vitrine.difference_of_means(acts)
            >>> sweep = server.sweep("Ann", direction, layers=[2], scales=[0, 1], max_tokens=4, score=len)
            >>> figure = sweep.plot(path="sweep.png")
        """
        layers, scales = ([*dict.fromkeys(row[place] for row in self.rows)] for place in (0, 1))
        if any(row.score is None for row in self.rows):
            raise ValueError("the texts have no scores: sweep(..., score=...) with a function of a text")
        values = np.array([row.score for row in self.rows], float).reshape(-1, len(layers), len(scales)).mean(axis=0)
        return heat_map(values, layers, scales, title="score of the text", labels=("scale", "layer"), path=path)

    def __repr__(self) -> str:
        scored, several = any(row.score is not None for row in self.rows), any(row.prompt for row in self.rows)
        lines = [f"{'prompt  ' if several else ''}layer   scale  {'  score  ' if scored else ''}text"]
        for layer, scale, text, score, prompt in self.rows:
            shown = f"{score:7.3g}  " if score is not None else " " * 9 if scored else ""
            lines.append(f"{f'{prompt:6}  ' if several else ''}{layer:5}  {scale:6g}  {shown}{text!r}")
        return "\n".join(lines)


class SweepMethods(GenerateMethods):
    """The part of `Server` that runs sweeps."""

    async def sweep(
        self,
        /,
        prompt: Prompt | Sequence[Prompt],
        direction: Direction,
        *,
        layers: Sequence[int],
        scales: Sequence[float],
        unit: str = "absolute",
        max_tokens: int = 32,
        temperature: float = 0,
        score: Callable[[str], float] | None = None,
        progress: bool | None = None,
        **fields: Any,
    ) -> Sweep:
        """Steer along a direction at each layer with each scale; the texts share the server's forward passes.

        Args:
            prompt: A text or a chat, or a list of them.
            direction: The vectors, which are added at their points to all tokens; with `residual_norm`, to all but
                the first.
            layers: The direction's layers to use.
            scales: The factors of the vectors; 0 is the baseline.
            unit: `residual_norm` multiplies by the norm of each changed activation, so that scales suit every layer.
            max_tokens: The most tokens of each text.
            temperature: 0 takes the likeliest token each time.
            score: Returns a number for a text; runs on its own thread, so it may call the server.
            progress: Whether to show a progress bar; by default in terminals and notebooks, for several requests.
            fields: Further fields of the request, such as `seed`.

        Raises:
            IndexError: The direction has no such layer.
            ServerError: The server rejects the request.

        Examples:
            >>> acts = server.collect(["Ann has 3", "Tom ran"], "resid_post", labels=[1, 0])
            >>> direction = vitrine.difference_of_means(acts)
            >>> print(server.sweep("Ann has", direction, layers=[1, 3], scales=[0], max_tokens=1).rows[1].layer)
            3
        """
        prompts: list[Any] = [prompt] if isinstance(prompt, str) or is_chat(prompt) else list(prompt)
        check(prompts, "prompt")
        steers = [direction.at(layer, unit) for layer in layers]
        cells = [(layer_of(steer.point) or 0, scale) for steer in steers for scale in scales]
        variants = [[(steer * scale).operation] if scale else [] for steer in steers for scale in scales]
        fields |= {"max_tokens": max_tokens, "temperature": temperature}
        texts = [text_of(choice) for choice in await self._variants(prompts, variants, "text", progress, **fields)]
        scores = await asyncio.to_thread(lambda: [float(score(text)) if score else None for text in texts])
        whole = [(*cell, place) for place in range(len(prompts)) for cell in cells]
        rows = zip(whole, texts, scores, strict=True)
        return Sweep([Steered(layer, scale, text, own, place) for (layer, scale, place), text, own in rows])
