"""The logit lens, attention patterns, and the parts of a logit."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
import numpy.typing as npt

from vitrine.experiments.collecting import CollectMethods, new_session
from vitrine.experiments.plots import bars, heat_map, shown
from vitrine.experiments.prompt_batches import Prompt, check_one, is_chat, route
from vitrine.points import layer_of


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


@dataclass(frozen=True, repr=False)
class Attribution:
    """The parts of a token's logit after a prompt: what each component adds to it directly, through no other one.

    Attributes:
        values: `[parts]`; they add up to `logit`, except for rounding.
        names: The parts: `embed`, `positions`, `layers.3.attention`, `layers.3.attention.heads.2`, `layers.3.mlp`,
            `layers.3.mlp.neurons.17`, and `bias`, all biases together.
        logit: The logit of the target, minus that of a second one, before a soft cap of the model.
        targets: The target, or both.

    Examples:
        >>> parts = server.attribute("Ann has 3 boxes of", " pens")
        >>> parts.names[:3]
        ['embed', 'layers.0.attention', 'layers.0.mlp']
    """

    values: npt.NDArray[np.float32]
    names: list[str]
    logit: float
    targets: list[str | int]

    def top(self, count: int = 10) -> list[tuple[str, float]]:
        """The largest parts of either sign, the largest first.

        Examples:
            >>> len(server.attribute("Ann has 3 boxes of", " pens", by="neuron").top(3))
            3
        """
        order = np.argsort(-np.abs(self.values), kind="stable")[:count]
        return [(self.names[place], float(self.values[place])) for place in order]

    def plot(self, count: int = 30, path: str | Path | None = None) -> Any:
        """Bars of the largest parts; raises ImportError without matplotlib.

        Examples:
            >>> figure = server.attribute("Ann has 3 boxes of", " pens", by="head").plot(path="parts.png")
        """
        names, values = zip(*self.top(count), strict=True)
        title = f"parts of the logit {self.logit:.2f} of {' - '.join(shown(str(target)) for target in self.targets)}"
        return bars(np.array(values), names, title=title, label="logit", path=path)

    def __repr__(self) -> str:
        parts = ", ".join(f"{name} {value:+.2f}" for name, value in self.top(5))
        return f"Attribution({' - '.join(map(repr, self.targets))}: logit={self.logit:.3f}; {parts}, ...)"


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


class LensMethods(CollectMethods):
    """The part of `Server` that returns the logit lens, attention patterns, and the parts of a logit."""

    async def tokens(self, prompt: Prompt) -> list[str]:
        """The texts of a prompt's tokens, as in the lens.

        Examples:
            >>> server.tokens("Tom has 3")
            ['Tom', ' has', ' ', '3']
        """
        return list((await self._tokenized(prompt))["token_texts"])

    async def _tokenized(self, prompt: Prompt) -> dict[str, Any]:
        body = {"messages": prompt} if is_chat(prompt) else {"prompt": prompt}
        return await self.post(f"{self.url}/tokenize", {"model": self.model, "return_token_strs": True, **body})

    async def attribute(
        self,
        prompt: Prompt,
        target: str | int | tuple[str | int, str | int],
        *,
        by: Literal["layer", "head", "neuron"] = "layer",
    ) -> Attribution:
        """Direct logit attribution: the parts that components add to a token's logit after a prompt.

        Args:
            prompt: A text or a chat.
            target: The token, by its text (with its space, `" Paris"`) or id; two for the difference of their logits.
            by: `layer` has a part for attention and one for the MLP of each layer, `head` divides attention into
                heads, `neuron` the MLP into neurons.

        Raises:
            ServerError: The server rejects the request: a target is several tokens, the MLPs have no neurons, or the
                parts of this model do not add up to its logits.

        Examples:
            >>> server.attribute("Ann has 3 boxes of", (" pens", " boxes"), by="head").names[1]
            'layers.0.attention.heads.0'
        """
        check_one(prompt, "prompt")
        _, field = route(prompt)
        targets = [target] if isinstance(target, str | int) else list(target)
        body = {"model": self.model, **field, "targets": targets, "by": by}
        answer = await self.post("/model/attribution", body, 1)
        names, values = list[str](), list[float]()
        for part in answer["parts"]:
            one_each = part["name"].endswith(("heads", "neurons"))
            names += [f"{part['name']}.{i}" if one_each else part["name"] for i in range(len(part["values"]))]
            values += part["values"]
        return Attribution(np.array(values, np.float32), names, answer["logit"], targets)

    async def lens(
        self,
        /,
        prompt: Prompt,
        *,
        targets: str | int | Sequence[str | int] = (),
        layers: str | Sequence[int] = "all",
        tokens: Any = "prompt",
        top_k: int = 1,
        lens: str | None = None,
        **fields: Any,
    ) -> Lens:
        """The logit lens at tokens of a prompt.

        Args:
            prompt: A text or a chat.
            targets: Tokens whose logprob and rank to return, each by its id or its text (with its space: `"Paris"` and
                `" Paris"` are different tokens).
            layers: Layer numbers, -1 for the last; by default all.
            tokens: The tokens of the prompt, as in docs/concepts.md.
            top_k: The number of top next tokens.
            lens: The name of the installed fitted lens to read through; None for the plain one.
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
        asked = {"layers": layers, "top_k": top_k, "tokens": tokens, "targets": targets, "lens": lens}
        answer = await self.complete(prompt, **fields, max_tokens=0, logit_lens=asked)
        entries = answer["choices"][0]["logit_lens"]["prompt"]
        numbers = [reading["layer"] for reading in entries[0]["layers"]]
        if not isinstance(layers, str):
            depth = (await self.get("/model/structure", {"model": self.model}))["layers"]
            numbers = list(dict.fromkeys(int(layer) % depth for layer in layers))
        return _lens(entries, targets, numbers)

    @overload
    async def attention(self, prompt: Prompt, layer: int) -> Attention: ...
    @overload
    async def attention(self, prompt: Prompt, layer: Sequence[int]) -> list[Attention]: ...
    async def attention(self, prompt: Prompt, layer: int | Sequence[int]) -> Attention | list[Attention]:
        """The attention pattern of a prompt in one layer; it is also stored, in a session `attention-...`.

        Args:
            prompt: A text or a chat.
            layer: The layer's number; -1 is the last. For several numbers, the result is a list in their order.

        Raises:
            ServerError: The server rejects the request, for example because the model's attention has no patterns.

        Examples:
            >>> attention = server.attention("Ann has 3 boxes", layer=-1)
            >>> attention.layer, attention.values.shape[1:] == (len(attention.tokens), len(attention.tokens))
            (5, True)
        """
        check_one(prompt, "prompt")
        points = [f"layers.{each}.attention.weights" for each in np.atleast_1d(layer)]
        capture = {"points": points, "mode": "trace", "required": True}
        asked = self.complete(prompt, capture=capture, max_tokens=0, session_id=new_session("attention"))
        answer, tokens = await asyncio.gather(asked, self.tokens(prompt))
        (run,) = await self.load_runs(answer, points)
        patterns = []
        for point, rows in run.items():
            wide = [np.pad(row, ((0, 0), (0, len(rows) - row.shape[1]))) for row in rows]
            patterns.append(Attention(layer_of(point) or 0, np.stack(wide, axis=1), tokens))
        return patterns if np.ndim(layer) else patterns[0]


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
