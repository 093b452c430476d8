"""The logit lens: the tokens that each layer's output predicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vitrine.experiments.generating import GenerateMethods
from vitrine.experiments.plots import heat_map, shown
from vitrine.experiments.prompt_batches import Prompt, check_one


@dataclass(frozen=True, repr=False)
class Lens:
    """The model's final norm and head applied to layer outputs at tokens of a prompt.

    Attributes:
        tokens: The prompt's token at each position.
        positions: The tokens' positions.
        layers: The layers, from 0, in the order in which they were asked for.
        top: For each layer and position, the top next tokens: (text, logprob), the likeliest first.
        targets: The tokens whose logprobs and ranks were requested.
        logprobs: The targets' logprobs, `[layers, positions, targets]`; nan if a layer's values are not finite.
        ranks: The targets' ranks from 1, `[layers, positions, targets]`; 0 if a layer's values are not finite.

    Examples:
        >>> lens = server.lens("Ann has 3 boxes of", targets=[" pens"])
        >>> lens.ranks.shape == lens.logprobs.shape == (6, len(lens.tokens), 1)
        True
    """

    tokens: list[str]
    positions: list[int]
    layers: list[int]
    top: list[list[list[tuple[str, float]]]]
    targets: list[str]
    logprobs: npt.NDArray[np.float32]
    ranks: npt.NDArray[np.int64]

    def plot(self, target: int | None = None, path: str | Path | None = None) -> Any:
        """A heat map of layers and tokens: the logprob of a target, or of the top token with its text.

        Args:
            target: The index in `targets`; None for the top tokens.
            path: A file to write.

        Raises:
            ImportError: matplotlib is not installed.

        Examples:
            >>> figure = server.lens("Ann has 3 boxes of", targets=[" pens"]).plot(target=0, path="lens.png")
        """
        names = [shown(token) for token in self.tokens]
        if target is not None:
            title = f"logprob of {shown(self.targets[target])!r}"
            values: Any = self.logprobs[:, :, target]
            return heat_map(values, self.layers, names, title=title, labels=("token", "layer"), path=path)
        values = np.array([[tops[0][1] if tops else np.nan for tops in row] for row in self.top])
        texts = [[shown(tops[0][0]) if tops else "" for tops in row] for row in self.top]
        title = "likeliest next token, and its logprob"
        return heat_map(values, self.layers, names, title=title, labels=("token", "layer"), path=path, texts=texts)

    def __repr__(self) -> str:
        return f"Lens({len(self.layers)} layers, {len(self.positions)} tokens, targets={self.targets!r})"


class LensMethods(GenerateMethods):
    """The part of `Server` that computes the logit lens."""

    async def lens(
        self,
        /,
        prompt: Prompt,
        *,
        targets: str | int | Sequence[str | int] = (),
        layers: str | Sequence[int] = "all",
        tokens: Any = "prompt",
        top_k: int = 1,
        **fields: Any,
    ) -> Lens:
        """The logit lens at tokens of a prompt.

        Args:
            prompt: A text or a chat.
            targets: Tokens whose logprob and rank to return, each by its id or its text (with its space: `"Paris"` and
                `" Paris"` are different tokens).
            layers: Layer numbers, -1 for the last; by default all.
            tokens: The tokens of the prompt, as in docs/points.md.
            top_k: The number of top next tokens.
            fields: Further fields of the request, such as `interventions`.

        Raises:
            ServerError: The server rejects the request, for example because a target is several tokens.

        Examples:
            >>> lens = server.lens("Ann has 3 boxes of", targets=[" pens"], tokens="prompt_last")
            >>> lens.logprobs.shape, lens.top[-1][0][0][0] == lens.top[5][0][0][0]
            ((6, 1, 1), True)
        """
        check_one(prompt, "prompt")
        targets = [targets] if isinstance(targets, str | int) else list(targets)
        asked = {"layers": layers, "top_k": top_k, "tokens": tokens, "targets": targets}
        answer = await self.complete(prompt, **fields, max_tokens=0, logit_lens=asked)
        entries = answer["choices"][0]["logit_lens"]["prompt"]
        numbers = [reading["layer"] for reading in entries[0]["layers"]]
        if not isinstance(layers, str):
            depth = (await self.get("/model/structure", {"model": self.model}))["layers"]
            numbers = list(dict.fromkeys(int(layer) % depth for layer in layers))
        return _lens(entries, targets, numbers)


def _lens(entries: Sequence[dict[str, Any]], targets: Sequence[str | int], layers: list[int]) -> Lens:
    """The lens of the tokens in an answer, with its layers in this order."""
    by_number = {readings[0]["layer"]: readings for readings in zip(*(e["layers"] for e in entries), strict=True)}
    by_layer = [by_number[layer] for layer in layers]
    shape = (len(by_layer), len(entries), len(targets))
    logprobs, ranks = np.full(shape, np.nan, np.float32), np.zeros(shape, np.int64)
    names = [str(target) for target in targets]
    for row, layer in enumerate(by_layer):
        for column, reading in enumerate(layer):
            for place, target in enumerate(reading.get("targets", ())):
                logprobs[row, column, place], ranks[row, column, place] = target["logprob"], target["rank"]
                names[place] = target["token"]
    return Lens(
        tokens=[entry["token"] for entry in entries],
        positions=[entry["position"] for entry in entries],
        layers=layers,
        top=[[[(top["token"], top["logprob"]) for top in reading["top"]] for reading in layer] for layer in by_layer],
        targets=names,
        logprobs=logprobs,
        ranks=ranks,
    )
