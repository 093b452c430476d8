"""Activation patching: activations of a clean run replace those of a corrupt run, one at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vitrine.connection.transport import together
from vitrine.experiments.collecting import CollectMethods
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
        names = [shown(one) if one == other else f"{shown(one)} / {shown(other)}" for one, other in self.tokens]
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
        prompt's activations are stored in a session of their own.

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
            message = (
                f"clean has {len(own)} tokens, corrupt {len(others)}: reword one, so that they have the same number"
            )
            raise ValueError(f"{message}\n  clean:   {own}\n  corrupt: {others}")
        at = _chosen("positions", positions, range(len(own)))
        acts = await self.collect([clean], point, tokens="prompt", progress=False)
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
        choices = await self._variants(prompt, variants, "patch", progress, max_tokens=0, logit_lens=lens)
        found = [choice["logit_lens"]["prompt"][0]["layers"][0]["targets"] for choice in choices]
        return [float(one["logprob"] - sum(other["logprob"] for other in others)) for one, *others in found]


def _patch(point: str, position: int, run_id: str) -> list[dict[str, Any]]:
    """One variant: replace the activation of one token."""
    tokens = {"positions": [position]}
    return [{"op": "replace", "point": point, "tokens": tokens, "from": {"run_id": run_id, "tokens": tokens}}]


def _chosen(name: str, wanted: Sequence[int] | None, there: Sequence[int]) -> list[int]:
    """Resolve layers or positions; negative ones count from the end.

    Raises:
        IndexError: One does not exist; the message starts with `name`.
    """
    if wanted is None:
        return list(there)
    found = [int(one) + (there[-1] + 1 if one < 0 else 0) for one in wanted]
    if missing := [int(one) for one, place in zip(wanted, found, strict=True) if place not in there]:
        raise IndexError(f"{name}: {missing} are not among {there[0]} to {there[-1]}")
    return list(dict.fromkeys(found))
