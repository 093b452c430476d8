"""The logit lens: which tokens come of a layer's output where a token is decided."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from deployments.activations.points import Place
from deployments.engine.request import MOST_LOGPROBS, Lens, Likeliest
from deployments.engine.sampling import ranked
from deployments.engine.unembedding import Unembedding
from deployments.errors import RequestError

LOGITS_BYTES = 64 << 20  # of the logits, as float32, that are made at a time


def check_lens(lens: Lens, readout: Unembedding) -> None:
    """Refuse what a model cannot say of its layers.

    Raises:
        RequestError: It has no readout, or there are too many tokens.
    """
    if readout.refusal:
        message = f"this model has no logit lens: {readout.refusal}"
        raise RequestError(message, "logit_lens", "logit_lens_unsupported")
    if not 1 <= lens.top_k <= MOST_LOGPROBS:
        raise RequestError(f"from 1 to {MOST_LOGPROBS} tokens of each layer can be asked for", "logit_lens.top_k")


class Asking(NamedTuple):
    """A row of a forward that asks.

    Attributes:
        row: Its place in the batch.
        at: Which of the forward's tokens decides its next one.
        lens: What it asks for.
    """

    row: int
    at: int
    lens: Lens


class Lenses:
    """What layers give in a forward to the rows that ask, which is then read at once.

    Attributes:
        asking: Those rows.
        places: What to visit.
    """

    def __init__(self, asking: Sequence[Asking]) -> None:
        self.asking = asking
        self._of: dict[Place, list[int]] = {}  # who asks for each, by their turn
        for turn, one in enumerate(asking):
            for point in one.lens.points:
                self._of.setdefault(point.place, []).append(turn)
        self.places = list(self._of)
        # Most places have the same; a model's layers may lie on several devices.
        self._index: dict[tuple[tuple[int, ...], torch.device], tuple[torch.Tensor, torch.Tensor]] = {}
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
        """Copy what is asked for of a value [batch, tokens, hidden], where anything is."""
        if place in self._of:
            rows, at = self._where(tuple(self._of[place]), value.device)
            self._taken[place] = value[rows, at]

    def _where(self, turns: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows and tokens, [those who ask] each, on a device."""
        if (turns, device) not in self._index:
            pairs = torch.tensor([(self.asking[turn].row, self.asking[turn].at) for turn in turns], device=device)
            self._index[turns, device] = pairs[:, 0], pairs[:, 1]
        return self._index[turns, device]

    def read(self, readout: Unembedding) -> dict[int, tuple[Likeliest, ...]]:
        """By row, the likeliest tokens of each layer; none of one that the forward left out or that is not finite."""
        if not self.asking:
            return {}
        for place in self._of.keys() - self._taken.keys():
            self._taken[place] = torch.full((len(self._of[place]), *place.shape), torch.nan, dtype=place.dtype)
        rows = torch.cat([self._taken[place].to(readout.device) for place in self._of])  # [turns, hidden]
        found = _likeliest(rows, [self.asking[turn].lens.top_k for _, turn in self._turns()], readout)
        return {one.row: tuple(found[i] for i in rows) for one, rows in zip(self.asking, self._rows, strict=True)}


def _likeliest(rows: torch.Tensor, most: Sequence[int], readout: Unembedding) -> list[Likeliest]:
    """The likeliest tokens of each row [rows, hidden], so many of them, a few rows at a time."""
    count = max(1, LOGITS_BYTES // (4 * readout.vocabulary))
    found: list[Likeliest] = []
    for first in range(0, len(rows), count):
        logits = readout.logits(rows[first : first + count]).float()  # [count, vocabulary]
        finite = logits.amax(dim=-1).isfinite().tolist()
        top = ranked(logits.log_softmax(dim=-1), most[first : first + count])
        found += [tokens if sound else () for tokens, sound in zip(top, finite, strict=True)]
    return found
