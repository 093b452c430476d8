"""The logit lens: each layer's top tokens at the positions that predict a token."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from deployments.engine.decoding.logprobs import as_likeliest, ranked
from deployments.engine.decoding.transfers import Array, Download, to_device
from deployments.engine.request import MOST_LOGPROBS, LayerTokens, LensLayers
from deployments.errors import RequestError
from deployments.model.unembedding import Unembedding
from deployments.places.hook_site import HookSite

LOGITS_BYTES = 64 << 20  # of float32 logits computed at a time


def check_lens(lens: LensLayers, readout: Unembedding) -> None:
    """Reject a lens that this model cannot compute.

    Raises:
        RequestError: It has no readout, or there are too many tokens.
    """
    if readout.refusal:
        message = f"this model has no logit lens: {readout.refusal}"
        raise RequestError(message, "logit_lens", "logit_lens_unsupported")
    if not 0 <= lens.top_k <= MOST_LOGPROBS:
        raise RequestError(f"top_k must be from 0 to {MOST_LOGPROBS}", "logit_lens.top_k")


class LensRow(NamedTuple):
    """A row of a forward pass, by its index in it, and the lens requested for it."""

    row: int
    lens: LensLayers


class LensReader:
    """Copies the layer outputs of a forward pass for the rows with a lens, then applies the lens to all of them.

    Attributes:
        asking: The rows with a lens.
        places: The places to read.
    """

    def __init__(self, asking: Sequence[LensRow]) -> None:
        self.asking = asking
        self._of: dict[HookSite, list[int]] = {}  # place -> indices in `asking`
        # Rows of one fitted lens lie together, in any order of lenses.
        for turn, row in sorted(enumerate(asking), key=lambda numbered: id(numbered[1].lens.fitted)):
            read = (*row.lens.points, *([row.lens.last] if row.lens.last else []))
            for place in dict.fromkeys(point.place for point in read):
                self._of.setdefault(place, []).append(turn)
        self.places = list(self._of)
        layers = (zip(row.lens.points, row.lens.layers, strict=True) for row in asking)
        self._layer = {point.place: layer for pairs in layers for point, layer in pairs}
        self._turns = [(place, turn) for place, turns in self._of.items() for turn in turns]  # of each copied row
        self._index: dict[HookSite, torch.Tensor] = {}  # row numbers [indices] on the place's device
        self._taken: dict[HookSite, torch.Tensor] = {}  # [indices, hidden]
        self._uploaded: list[torch.Tensor] | None = None  # those of `_targets`
        turns = {key: i for i, key in enumerate(self._turns)}
        self._rows = [[turns[point.place, turn] for point in row.lens.points] for turn, row in enumerate(asking)]
        # For each index whose target is the last layer's top token: the row of that layer.
        self._last = {turn: turns[row.lens.last.place, turn] for turn, row in enumerate(asking) if row.lens.last}

    def begin(self) -> None:
        """Clear the last forward pass, which may have failed halfway."""
        self._taken.clear()

    def take(self, place: HookSite, value: torch.Tensor) -> None:
        """Copy the rows with a lens from a value [rows, hidden], if there are any."""
        if place in self._of:
            if place not in self._index:
                rows = np.array([self.asking[turn].row for turn in self._of[place]], np.int64)
                (self._index[place],) = to_device([rows], value.device)
            self._taken[place] = value[self._index[place]]

    def read(self, readout: Unembedding) -> list[tuple[LayerTokens, ...]]:
        """The result of each layer for each row; empty if the layer was skipped or its values are not finite."""
        if not self.asking:
            return []
        for place in self._of.keys() - self._taken.keys():
            shape = (len(self._of[place]), *place.shape)
            self._taken[place] = torch.full(shape, torch.nan, dtype=place.dtype, device=readout.device)
        rows = torch.cat([self._mapped(place).to(readout.device) for place in self._of])  # [turns, hidden]
        if self._uploaded is None:
            self._uploaded = to_device(self._targets(), readout.device)
        targets, last, turns, of = self._uploaded
        if len(last):
            likeliest = torch.cat([readout.logits(some).argmax(dim=-1) for some in _split(rows[last], readout)])
            targets = targets.clone()
            targets[:, 0].index_copy_(0, turns, likeliest[of])
        lenses = [self.asking[turn].lens for _, turn in self._turns]
        most = [lens.top_k for lens in lenses]
        chunks = zip(_split(rows, readout), _split(targets, readout), strict=True)
        parts = [_scores(readout.logits(some).float(), ids, max(most)) for some, ids in chunks]
        found = Download({name: torch.cat([part[name] for part in parts]) for name in parts[0]}).read()
        ids, logprobs, ranks = (found[name].tolist() for name in ("targets", "own", "ranks"))
        finite, results = np.isfinite(found["highest"]), list[LayerTokens]()
        for i, (lens, top) in enumerate(zip(lenses, as_likeliest(found, most), strict=True)):
            count = 1 if lens.last else len(lens.targets)
            own = tuple(zip(ids[i][:count], logprobs[i], ranks[i], strict=False))
            results.append(LayerTokens(top, own) if finite[i] else LayerTokens())
        return [tuple(results[i] for i in rows) for rows in self._rows]

    def _mapped(self, place: HookSite) -> torch.Tensor:
        """The copied rows of a place, [rows, hidden], through the fitted lenses of their requests."""
        rows, parts = self._taken[place], list[torch.Tensor]()
        for fitted, turns in itertools.groupby(self._of[place], lambda turn: self.asking[turn].lens.fitted):
            part, rows = torch.split(rows, [count := len(list(turns)), len(rows) - count])
            parts.append(fitted.apply(self._layer[place], part) if fitted and place in self._layer else part)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _targets(self) -> list[Array]:
        """The target ids of each copied row, [turns, targets], and where these come from the last layer.

        The other arrays are: the copied rows of last layers, [lasts]; the rows whose first target is the top token of
        one of these, [rows]; and of which, [rows].
        """
        of = {turn: i for i, turn in enumerate(self._last)}
        targets = [[0] if turn in of else self.asking[turn].lens.targets for _, turn in self._turns]
        widest = max(map(len, targets))
        replaced = [(i, of[turn]) for i, (_, turn) in enumerate(self._turns) if turn in of]
        return [
            np.array([[*some, *[0] * (widest - len(some))] for some in targets], np.int64),
            np.array(list(self._last.values()), np.int64),
            np.array([i for i, _ in replaced], np.int64),
            np.array([last for _, last in replaced], np.int64),
        ]


def _split(rows: torch.Tensor, readout: Unembedding) -> tuple[torch.Tensor, ...]:
    """Rows [rows, ...] in parts whose logits are computed at a time."""
    return torch.split(rows, max(1, LOGITS_BYTES // (4 * readout.vocabulary)))


def _scores(logits: torch.Tensor, targets: torch.Tensor, most: int) -> dict[str, torch.Tensor]:
    """Each row's highest logit, its top tokens, and its targets' logprobs and ranks; equal ones share a rank.

    Args:
        logits: [rows, vocabulary] float32.
        targets: [rows, targets] token ids.
        most: The number of top tokens.
    """
    logprobs = logits.log_softmax(dim=-1)
    own = logprobs.gather(-1, targets)  # [rows, targets]
    ranks = torch.empty_like(targets)
    for i, column in enumerate(own.unbind(-1)):
        ranks[:, i] = (logprobs > column[:, None]).sum(dim=-1) + 1
    scores = {"targets": targets, "own": own, "ranks": ranks, "highest": logits.amax(dim=-1)}
    return scores | ranked(logprobs, most)
