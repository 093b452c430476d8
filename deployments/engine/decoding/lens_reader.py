"""The logit lens: each layer's top tokens at the positions that predict a token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from deployments.engine.decoding.sampling import ranked
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
    """A row of a forward pass with a logit lens.

    Attributes:
        row: Its index in the forward pass.
        lens: The requested lens.
    """

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
        for turn, row in enumerate(asking):
            for place in _places(row.lens):
                self._of.setdefault(place, []).append(turn)
        self.places = list(self._of)
        # Most places share the same indices; layers may be on several devices.
        self._index: dict[tuple[tuple[int, ...], torch.device], torch.Tensor] = {}
        self._taken: dict[HookSite, torch.Tensor] = {}  # [indices, hidden]
        turns = {(turn, place): i for i, (place, turn) in enumerate(self._turns())}
        self._rows = [[turns[turn, point.place] for point in row.lens.points] for turn, row in enumerate(asking)]
        # For each index whose target is the last layer's top token: the row of that layer.
        self._last = {turn: turns[turn, row.lens.last.place] for turn, row in enumerate(asking) if row.lens.last}

    def _turns(self) -> Iterator[tuple[HookSite, int]]:
        """The place and index of each copied row."""
        return ((place, turn) for place, turns in self._of.items() for turn in turns)

    def begin(self) -> None:
        """Clear the last forward pass, which may have failed halfway."""
        self._taken.clear()

    def take(self, place: HookSite, value: torch.Tensor) -> None:
        """Copy the rows with a lens from a value [rows, hidden], if there are any."""
        if place in self._of:
            self._taken[place] = value[self._where(tuple(self._of[place]), value.device)]

    def _where(self, turns: tuple[int, ...], device: torch.device) -> torch.Tensor:
        """Row numbers [indices] on a device."""
        if (turns, device) not in self._index:
            self._index[turns, device] = torch.tensor([self.asking[turn].row for turn in turns], device=device)
        return self._index[turns, device]

    def read(self, readout: Unembedding) -> list[tuple[LayerTokens, ...]]:
        """The result of each layer for each row; empty if the layer was skipped or its values are not finite."""
        if not self.asking:
            return []
        for place in self._of.keys() - self._taken.keys():
            self._taken[place] = torch.full((len(self._of[place]), *place.shape), torch.nan, dtype=place.dtype)
        rows = torch.cat([self._taken[place].to(readout.device) for place in self._of])  # [turns, hidden]
        last = dict(zip(self._last, _likeliest(rows[list(self._last.values())], readout), strict=True))
        targets = [(last[turn],) if turn in last else row.lens.targets for turn, row in enumerate(self.asking)]
        asked = [(self.asking[turn].lens.top_k, targets[turn]) for _, turn in self._turns()]
        results = _read(rows, asked, readout)
        return [tuple(results[i] for i in rows) for rows in self._rows]


def _places(lens: LensLayers) -> dict[HookSite, None]:
    """The places that a lens reads, without repetition."""
    return dict.fromkeys(point.place for point in (*lens.points, lens.last) if point is not None)


def _logits(rows: torch.Tensor, readout: Unembedding) -> Iterator[torch.Tensor]:
    """The logits [count, vocabulary] of rows [rows, hidden], a few rows at a time."""
    count = max(1, LOGITS_BYTES // (4 * readout.vocabulary))
    for first in range(0, len(rows), count):
        yield readout.logits(rows[first : first + count]).float()


def _likeliest(rows: torch.Tensor, readout: Unembedding) -> list[int]:
    """The top token of each row [rows, hidden]."""
    return [token for logits in _logits(rows, readout) for token in logits.argmax(dim=-1).tolist()]


def _read(rows: torch.Tensor, asked: Sequence[tuple[int, tuple[int, ...]]], readout: Unembedding) -> list[LayerTokens]:
    """The top tokens of each row [rows, hidden], and the logprobs and ranks of its targets.

    Args:
        rows: Outputs of layers.
        asked: For each row, the number of top tokens and the target ids.
        readout: The model's final norm and head.
    """
    results: list[LayerTokens] = []
    for logits in _logits(rows, readout):
        some = asked[len(results) : len(results) + len(logits)]
        finite = logits.amax(dim=-1).isfinite().tolist()
        logprobs = logits.log_softmax(dim=-1)
        top = ranked(logprobs, [top_k for top_k, _ in some])
        targets = _ranks(logprobs, [targets for _, targets in some])
        each = zip(top, targets, finite, strict=True)
        results += [LayerTokens(likely, own) if sound else LayerTokens() for likely, own, sound in each]
    return results


def _ranks(logprobs: torch.Tensor, targets: Sequence[tuple[int, ...]]) -> list[tuple[tuple[int, float, int], ...]]:
    """The (id, logprob, rank) of each row's targets; equal logprobs share a rank."""
    widest = max(map(len, targets))
    ids = torch.tensor([[*some, *[0] * (widest - len(some))] for some in targets], device=logprobs.device)
    values = logprobs.gather(-1, ids.long())  # [rows, widest]
    columns = [(logprobs > column[:, None]).sum(dim=-1) + 1 for column in values.unbind(-1)]
    ranks = torch.stack(columns, dim=-1).tolist() if columns else [[]] * len(targets)
    return [tuple(zip(*row, strict=False)) for row in zip(targets, values.tolist(), ranks, strict=True)]
