"""The logit lens: the tokens that each layer's output would predict."""

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
    """What the model's final norm and head make of its layers' outputs at tokens of a prompt.

    Attributes:
        tokens: By position, the prompt's token.
        positions: The tokens' positions.
        layers: The layers, from 0.
        top: By layer and position, the likeliest next tokens: (text, logprob), the likeliest first.
        targets: The tokens whose logprobs and ranks were requested.
        logprobs: Theirs, `[layers, positions, targets]`; nan where a layer's values are not finite.
        ranks: Theirs, from 1, `[layers, positions, targets]`; 0 where a layer's values are not finite.

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
        """A heat map of layers and tokens: the logprob of a target, or of the likeliest token with its text.

        Args:
            target: Its number in `targets`; without one the likeliest tokens.
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
    """A server that shows what its layers would say."""

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
            targets: Tokens, each by its text (with its space: `"Paris"` is another token than `" Paris"`) or id, whose
                logprob and rank are wanted.
            layers: Their numbers, -1 for the last; by default all.
            tokens: Which tokens of the prompt, as in docs/points.md.
            top_k: How many of the likeliest next tokens.
            fields: Other fields of the request, such as `interventions`.

        Raises:
            ServerError: The server refuses; for one, a target is several tokens.

        Examples:
            >>> lens = server.lens("Ann has 3 boxes of", targets=[" pens"], tokens="prompt_last")
            >>> lens.logprobs.shape, lens.top[-1][0][0][0] == lens.top[5][0][0][0]
            ((6, 1, 1), True)
        """
        check_one(prompt, "prompt")
        targets = [targets] if isinstance(targets, str | int) else list(targets)
        asked = {"layers": layers, "top_k": top_k, "tokens": tokens, "targets": targets}
        answer = await self.complete(prompt, **fields, max_tokens=0, logit_lens=asked)
        return read(answer["choices"][0]["logit_lens"]["prompt"], targets)


def read(entries: Sequence[dict[str, Any]], targets: Sequence[str | int]) -> Lens:
    """A lens of the tokens that an answer has."""
    by_layer = list(zip(*(entry["layers"] for entry in entries), strict=True))
    shape = (len(by_layer), len(entries), len(targets))
    logprobs, ranks = np.full(shape, np.nan, np.float32), np.zeros(shape, np.int64)
    names = [str(target) for target in targets]
    for row, layer in enumerate(by_layer):
        for column, one in enumerate(layer):
            for place, found in enumerate(one.get("targets", ())):
                logprobs[row, column, place], ranks[row, column, place] = found["logprob"], found["rank"]
                names[place] = found["token"]
    return Lens(
        tokens=[entry["token"] for entry in entries],
        positions=[entry["position"] for entry in entries],
        layers=[one["layer"] for one in entries[0]["layers"]],
        top=[[[(top["token"], top["logprob"]) for top in one["top"]] for one in layer] for layer in by_layer],
        targets=names,
        logprobs=logprobs,
        ranks=ranks,
    )
