"""Prompts' recorded rows: read once for each place of a forward pass, and split by request later."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from deployments.engine.capture.buffer import CaptureBuffer
from deployments.places.hook_site import HookSite


class PromptRows(NamedTuple):
    """Rows of one prompt in a forward pass.

    Attributes:
        recording: The prompt's buffer.
        row: The first row's index in the forward pass.
        start: The position of its token.
        tokens: How many rows there are, recorded or not.
    """

    recording: CaptureBuffer
    row: int
    start: int
    tokens: int

    def after(self, position: int) -> PromptRows:
        """Those of tokens from a position on."""
        first = min(self.tokens, max(0, position - self.start))
        return self._replace(row=self.row + first, start=self.start + first, tokens=self.tokens - first)


class Gathering:
    """The recorded rows of prompts with the same points, in one forward pass.

    A step costs one read for each place and a few copies for each request, not a copy for each place of each request.
    On a GPU all rows of the same dtype and shape leave it together.
    """

    def __init__(self, prompts: Sequence[PromptRows]) -> None:
        """Choose the rows.

        Args:
            prompts: Prompts whose buffers have the same points and take `fill`.
        """
        self._slices = list[tuple[CaptureBuffer, slice]]()
        rows = list[int]()
        for recording, row, start, tokens in prompts:
            if wanted := recording.wanted(start, tokens):
                self._slices.append((recording, slice(len(rows), len(rows) + len(wanted))))
                rows += [row + position - start for position in wanted]
        self._rows = torch.tensor(rows)
        self._rows_on: dict[torch.device, torch.Tensor] = {}
        self._values: dict[HookSite, torch.Tensor] = {}
        self._stacked: list[torch.Tensor] = []

    def take(self, place: HookSite, value: torch.Tensor) -> None:
        """Read the rows of a place's value [rows, ...]; the model may overwrite them later."""
        if not self._slices or not self._slices[0][0].reads(place):
            return
        if value.device not in self._rows_on:
            self._rows_on[value.device] = self._rows.to(value.device)
        self._values[place] = value.index_select(0, self._rows_on[value.device])

    def stack(self) -> None:
        """Bring the rows to the host. This takes memory, and changes no buffer."""
        if self._slices and self._slices[0][0].comes_with(self._values):
            self._stacked = self._slices[0][0].stacked(self._values)
        self._values.clear()

    def split(self) -> None:
        """Copy the rows to their buffers, which still have to `keep` them; those of failed ones are dropped."""
        for recording, rows in self._slices:
            if not recording.failed:
                with recording.giving_up():
                    recording.fill(self._stacked, rows)


def gatherings(prompts: Iterable[PromptRows], most: int) -> tuple[list[Gathering], list[PromptRows]]:
    """Gather prompts that have the same points, as far as their rows take little memory.

    Args:
        prompts: All prompts that record rows in a forward pass.
        most: Bytes that gathered rows may take; twice as many while they are stacked.

    Returns:
        The gathered prompts, and those whose rows are to be copied one by one.
    """
    alike, rest = dict[tuple[str, ...], list[PromptRows]](), list[PromptRows]()
    for prompt in prompts:
        size = prompt.recording.size(prompt.start, prompt.tokens)
        if prompt.recording.gathers and size <= most:
            most -= size
            alike.setdefault(prompt.recording.names, []).append(prompt)
        else:
            rest.append(prompt)
    return [Gathering(of_one) for of_one in alike.values()], rest
