"""Attention patterns, and patching: a clean run's activations replace those of a corrupt run, one at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from vitrine.connection.transport import together
from vitrine.experiments.collecting import CollectMethods, new_session
from vitrine.experiments.plots import heat_map, shown
from vitrine.experiments.prompt_batches import Prompt, check_one, is_chat
from vitrine.points import layer_of

NO_WAY = 1e-3  # the difference between the values of two prompts that is only rounding


@dataclass(frozen=True, repr=False)
class PatchGrid:
    """The effect on a prompt's answer of replacing one activation at a time by that of another prompt.

    Attributes:
        values: `[layers, positions]`: the logprob of the target, minus that of `against` if given; this equals the
            difference of their logits.
        layers: The layers' numbers.
        positions: The tokens' positions.
        tokens: At each position, the clean prompt's token and the corrupt prompt's.
        clean: The value of the clean prompt.
        corrupt: The value of the corrupt prompt without a patch.

    Examples:
        >>> grid = server.patch_grid("Ann has 3 boxes of", "Ann has 4 boxes of", target=" pens", against=" boxes")
        >>> grid.values.shape == (6, len(grid.positions))
        True
    """

    values: npt.NDArray[np.float32]
    layers: list[int]
    positions: list[int]
    tokens: list[tuple[str, str]]
    clean: float
    corrupt: float

    @property
    def restored(self) -> npt.NDArray[np.float32]:
        """`values` scaled from the corrupt value, 0, to the clean value, 1; nan if both are equal.

        Examples:
            >>> grid = server.patch_grid("Tom has 3", "Tom has 4", target=" ", layers=[-1], positions=[-1])
            >>> round(float(grid.restored[0, 0]), 1)
            1.0
        """
        way = self.clean - self.corrupt
        return (self.values - self.corrupt) / (way if abs(way) > NO_WAY else np.nan)

    def plot(self, path: str | Path | None = None) -> Any:
        """A heat map of the change over layers and tokens; raises ImportError without matplotlib.

        Examples:
            >>> figure = server.patch_grid("Tom has 3", "Tom has 4", target=" ").plot(path="grid.png")
        """
        names = [shown(own) if own == other else f"{shown(own)} / {shown(other)}" for own, other in self.tokens]
        return heat_map(
            self.values - self.corrupt,
            self.layers,
            names,
            title=f"change by a patch (clean {self.clean:.2f}, corrupt {self.corrupt:.2f})",
            labels=("token: clean / corrupt", "layer"),
            path=path,
            centred=True,
        )

    def __repr__(self) -> str:
        shape = f"{len(self.layers)} layers x {len(self.positions)} tokens"
        return f"PatchGrid({shape}, clean={self.clean:.3f}, corrupt={self.corrupt:.3f})"


class PatchGridMethods(CollectMethods):
    """The part of `Server` that patches activations."""

    async def tokens(self, prompt: Prompt) -> list[str]:
        """The texts of a prompt's tokens, as in the lens.

        Examples:
            >>> server.tokens("Tom has 3")
            ['Tom', ' has', ' ', '3']
        """
        body = {"messages": prompt} if is_chat(prompt) else {"prompt": prompt}
        answer = await self.post(f"{self.url}/tokenize", {"model": self.model, "return_token_strs": True, **body})
        return list(answer["token_texts"])

    async def patch_grid(
        self,
        clean: Prompt,
        corrupt: Prompt,
        *,
        target: str | int,
        against: str | int | None = None,
        point: str = "resid_post",
        layers: Sequence[int] | None = None,
        positions: Sequence[int] | None = None,
        progress: bool | None = None,
    ) -> PatchGrid:
        """Patch a point of the clean prompt into the corrupt one, at one layer and token at a time.

        Each cell is one forward pass of the corrupt prompt; one request has 64 of them, which run together. The clean
        prompt's activations are stored in a session of their own, `patch-...`.

        Args:
            clean: A text or chat.
            corrupt: Another one with the same number of tokens.
            target: The token after the prompts, by its text (with its space, `" Paris"`) or id.
            against: Another token, whose logprob is subtracted.
            point: A point without its layer, or with `*` for the layer: `resid_post`, `layers.*.mlp.output`, `z`.
            layers: The layers, -1 for the last; by default all.
            positions: The positions, -1 for the last; by default all.
            progress: Whether to show a progress bar; by default in terminals and notebooks, for several requests.

        Raises:
            ValueError: The prompts have different numbers of tokens, which the message lists; or the point is
                outside the layers.
            IndexError: There is no such layer or position.
            ServerError: The server rejects the request, for example because a target is several tokens.

        Examples:
            >>> grid = server.patch_grid("Tom has 3", "Tom has 4", target=" ", point="mlp_out", positions=[0, 3])
            >>> grid.values.shape, grid.tokens
            ((6, 2), [('Tom', 'Tom'), ('3', '4')])
        """
        check_one(clean, "clean")
        check_one(corrupt, "corrupt")
        own, others = await together([self.tokens(clean), self.tokens(corrupt)])
        if len(own) != len(others):
            message = f"clean has {len(own)} tokens, corrupt {len(others)}: reword one, until they have the same number"
            raise ValueError(f"{message}\n  clean:   {own}\n  corrupt: {others}")
        at = _chosen("positions", positions, range(len(own)))
        acts = await self.collect([clean], point, tokens="prompt", session=new_session("patch"), progress=False)
        points = {layer: name for name in acts.points if (layer := layer_of(name)) is not None}
        if len(points) < len(acts.points):
            raise ValueError(f"point: {point!r} is not one place in each layer, but {', '.join(acts.points)}")
        wanted = _chosen("layers", layers, list(points))
        cells = [(layer, position) for position in at for layer in wanted]
        targets = [target] if against is None else [target, against]
        patches = [_patch(points[layer], position, acts.run_ids[0]) for layer, position in cells]
        whole, base, effects = await together(
            [
                self._effects(clean, [[]], targets, progress=False),
                self._effects(corrupt, [[]], targets, progress=False),
                self._effects(corrupt, patches, targets, progress),
            ]
        )
        values = np.array(effects, np.float32).reshape(len(at), len(wanted)).T
        names = [(own[position], others[position]) for position in at]
        return PatchGrid(values, wanted, at, names, *whole, *base)

    async def _effects(
        self,
        prompt: Prompt,
        variants: Sequence[Sequence[Mapping[str, Any]]],
        targets: Sequence[str | int],
        progress: bool | None,
    ) -> list[float]:
        """The first target's logprob after the prompt, minus the second's, for each variant."""
        lens = {"layers": [-1], "top_k": 0, "tokens": "prompt_last", "targets": list(targets)}
        choices = await self._variants([prompt], variants, "patch", progress, max_tokens=0, logit_lens=lens)
        targets_of = [choice["logit_lens"]["prompt"][0]["layers"][0]["targets"] for choice in choices]
        return [float(first["logprob"] - sum(other["logprob"] for other in others)) for first, *others in targets_of]


def _patch(point: str, position: int, run_id: str) -> list[dict[str, Any]]:
    """One variant: replace the activation of one token."""
    tokens = {"positions": [position]}
    return [{"op": "replace", "point": point, "tokens": tokens, "from": {"run_id": run_id, "tokens": tokens}}]


def _chosen(name: str, wanted: Sequence[int] | None, existing: Sequence[int]) -> list[int]:
    """Resolve layers or positions; negative ones count from the end.

    Raises:
        IndexError: One does not exist; the message starts with `name`.
    """
    if wanted is None:
        return list(existing)
    places = [int(number) + (existing[-1] + 1 if number < 0 else 0) for number in wanted]
    if missing := [int(number) for number, place in zip(wanted, places, strict=True) if place not in existing]:
        raise IndexError(f"{name}: {missing} are not among {existing[0]} to {existing[-1]}")
    return list(dict.fromkeys(places))


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
