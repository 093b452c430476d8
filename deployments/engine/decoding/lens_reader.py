"""The logit lens: each layer's likeliest tokens at the positions that predict a token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from deployments.engine.decoding.sampling import ranked
from deployments.engine.request import MOST_LOGPROBS, LayerTokens, LensLayers
from deployments.errors import RequestError
from deployments.model.unembedding import Unembedding
from deployments.places.place import Place

LOGITS_BYTES = 64 << 20  # of the logits, as float32, that are made at a time


def check_lens(lens: LensLayers, readout: Unembedding) -> None:
    """Refuse what a model cannot say of its layers.

    Raises:
        RequestError: It has no readout, or there are too many tokens.
    """
    if readout.refusal:
        message = f"this model has no logit lens: {readout.refusal}"
        raise RequestError(message, "logit_lens", "logit_lens_unsupported")
    if not 0 <= lens.top_k <= MOST_LOGPROBS:
        raise RequestError(f"from 0 to {MOST_LOGPROBS} tokens of each layer can be asked for", "logit_lens.top_k")


class LensRow(NamedTuple):
    """A row of a forward that asks.

    Attributes:
        row: Its place in the forward.
        lens: What it asks for.
    """

    row: int
    lens: LensLayers


class LensReader:
    """What layers give in a forward to the rows that ask, which is then read at once.

    Attributes:
        asking: Those rows.
        places: What to visit.
    """

    def __init__(self, asking: Sequence[LensRow]) -> None:
        self.asking = asking
        self._of: dict[Place, list[int]] = {}  # who asks for each, by their turn
        for turn, one in enumerate(asking):
            for point in one.lens.points:
                self._of.setdefault(point.place, []).append(turn)
        self.places = list(self._of)
        # Most places have the same; a model's layers may lie on several devices.
        self._index: dict[tuple[tuple[int, ...], torch.device], torch.Tensor] = {}
        self._taken: dict[Place, torch.Tensor] = {}  # [those who ask, hidden]
        turns = {(turn, place): i for i, (place, turn) in enumerate(self._turns())}
        self._rows = [[turns[turn, point.place] for point in one.lens.points] for turn, one in enumerate(asking)]

    def _turns(self) -> Iterator[tuple[Place, int]]:
        """Which row of all that are taken is whose."""
        return ((place, turn) for place, turns in self._of.items() for turn in turns)

    def begin(self) -> None:
        """Forget the last forward, which may have ended half way."""
        self._taken.clear()

    def take(self, place: Place, value: torch.Tensor) -> None:
        """Copy what is asked for of a value [rows, hidden], where anything is."""
        if place in self._of:
            self._taken[place] = value[self._where(tuple(self._of[place]), value.device)]

    def _where(self, turns: tuple[int, ...], device: torch.device) -> torch.Tensor:
        """[those who ask] rows, on a device."""
        if (turns, device) not in self._index:
            self._index[turns, device] = torch.tensor([self.asking[turn].row for turn in turns], device=device)
        return self._index[turns, device]

    def read(self, readout: Unembedding) -> list[tuple[LayerTokens, ...]]:
        """For each who asks, what comes of each layer; nothing of one that the forward left out or is not finite."""
        if not self.asking:
            return []
        for place in self._of.keys() - self._taken.keys():
            self._taken[place] = torch.full((len(self._of[place]), *place.shape), torch.nan, dtype=place.dtype)
        rows = torch.cat([self._taken[place].to(readout.device) for place in self._of])  # [turns, hidden]
        found = _read(rows, [self.asking[turn].lens for _, turn in self._turns()], readout)
        return [tuple(found[i] for i in rows) for rows in self._rows]


def _read(rows: torch.Tensor, lenses: Sequence[LensLayers], readout: Unembedding) -> list[LayerTokens]:
    """What comes of each row [rows, hidden], a few rows at a time."""
    count = max(1, LOGITS_BYTES // (4 * readout.vocabulary))
    found: list[LayerTokens] = []
    for first in range(0, len(rows), count):
        some = lenses[first : first + count]
        logits = readout.logits(rows[first : first + count]).float()  # [count, vocabulary]
        finite = logits.amax(dim=-1).isfinite().tolist()
        logprobs = logits.log_softmax(dim=-1)
        top = ranked(logprobs, [lens.top_k for lens in some])
        targets = _targets(logprobs, [lens.targets for lens in some])
        each = zip(top, targets, finite, strict=True)
        found += [LayerTokens(likely, own) if sound else LayerTokens() for likely, own, sound in each]
    return found


def _targets(logprobs: torch.Tensor, targets: Sequence[tuple[int, ...]]) -> list[tuple[tuple[float, int], ...]]:
    """The (logprob, rank) of each row's own tokens; of equals the first has the rank of all."""
    found: dict[int, list[tuple[float, int]]] = {}
    for token in {token for some in targets for token in some}:
        values = logprobs[:, token, None]  # [rows, 1]
        ranks = (logprobs > values).sum(-1) + 1
        found[token] = list(zip(values.squeeze(1).tolist(), ranks.tolist(), strict=True))
    return [tuple(found[token][row] for token in some) for row, some in enumerate(targets)]
