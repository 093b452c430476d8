"""Recorded rows on their way from a forward pass to the buffers: each place is read once for the whole batch.

Decoded rows gather in the ring over several steps. Prompts' rows are gathered within one forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from deployments.engine.capture.buffer import CaptureBuffer
from deployments.engine.capture.row_sizes import SPARE_ROWS
from deployments.places.hook_site import HookSite

WINDOW_BYTES = 32 << 20  # on a CPU: size of the ring in which decoded rows gather before they are split by request
GPU_PART = 128  # on a GPU: its memory divided by this is the ring's size; a window costs a copy for each place
BUDGET_PART = 4  # the memory for recorded rows divided by this is the ring's most, on a CPU in addition to that memory
WINDOW_STEPS = SPARE_ROWS  # for a request for its last rows, all rows of a window are spare


def window_bytes(device: torch.device, budget: int | None) -> int:
    """Bytes of the ring on a device.

    Args:
        device: The device.
        budget: Bytes of host memory for recorded rows; None for no limit.
    """
    window = WINDOW_BYTES
    if device.type == "cuda":
        window = max(window, torch.cuda.mem_get_info(device)[1] // GPU_PART)
    return window if budget is None else min(window, budget // BUDGET_PART)


def places_of(recordings: Iterable[CaptureBuffer]) -> list[HookSite]:
    """The places that these buffers read, in the order of execution."""
    places = {point.place for recording in recordings for point in recording.points}
    return sorted(places, key=lambda place: place.order)


class CaptureRing:
    """Gathers decoded rows of all recording sequences in a ring on the model's device.

    Each step writes one [sequences, ...] block for each place. A sequence's rows are copied out when the ring is full,
    or when the sequence leaves. A step therefore costs one copy for each place, however many sequences record, and
    tensors leave the device once per window. Attention patterns have another width in each step, so they leave the
    device in that step, together with the other rows of the same sequence.

    Attributes:
        window: The ring's size in bytes; one step's rows if those are larger. Also the most for gathered prompts' rows.
        recordings: The buffers that record the next forward pass, by their column.
        places: The places that they read, in the order of execution.
    """

    def __init__(self, device: torch.device, window: int) -> None:
        """Initialize an empty ring.

        Args:
            device: The device of the rows.
            window: As the attribute.
        """
        self._device = device
        self.window = window
        self._ring: dict[HookSite, torch.Tensor] = {}  # [steps, columns, ...]
        self._steps = 0
        self._step = 0
        self.places: list[HookSite] = []
        self.recordings: list[CaptureBuffer] = []

    def arrange(self, decoding: Sequence[CaptureBuffer]) -> Sequence[CaptureBuffer]:
        """Assign columns to exactly these buffers for the next forward pass.

        Returns:
            The buffers by their column; a buffer keeps its column where possible.
        """
        coming, here = set(decoding), set(self.recordings)
        if coming == here:
            return self.recordings
        for recording in [recording for recording in self.recordings if recording not in coming]:
            self.leave(recording)
        for recording in decoding:
            if recording not in here:
                recording.since = self._step
                self.recordings.append(recording)
        self.places = places_of(self.recordings)
        return self.recordings

    def begin(self) -> None:
        """Make room for one more step."""
        columns, places = len(self.recordings), [place for place in self.places if not place.grows]
        fits = all(place in self._ring and self._ring[place].shape[1] >= columns for place in places)
        if fits and self._step < self._steps:
            return
        host = {place: rows[: self._step].cpu() for place, rows in self._ring.items()} if self._step else {}
        for recording in self.recordings:
            self.cut(recording, host)
            recording.since = 0
        self._step = 0
        if not fits:
            columns = 1 << (columns - 1).bit_length()  # space for sequences that join
            step_bytes = columns * sum(math.prod(place.shape) * place.dtype.itemsize for place in places)
            steps = max(1, min(WINDOW_STEPS, self.window // step_bytes))
            self._ring, self._steps = {}, 0  # free the old ring before the new one is allocated
            self._ring = {
                place: torch.empty(steps, columns, *place.shape, dtype=place.dtype, device=self._device)
                for place in places
            }
            self._steps = steps

    def take(self, place: HookSite, value: torch.Tensor) -> None:
        """Copy a place's rows [columns, ...]; the model may overwrite them later."""
        self._ring[place][self._step, : len(value)] = value

    def take_patterns(self, place: HookSite, shown: Iterator[torch.Tensor]) -> None:
        """Copy attention patterns, [1, heads, keys] of each sequence that records them, at once.

        The fixed cost of a copy exceeds that of a row's bytes.
        """
        for recording in self.recordings:
            if recording.reads(place):
                with recording.giving_up():
                    recording.write(place, next(shown).cpu(), recording.rows)

    def end(self, came: Collection[HookSite]) -> None:
        """Close the step of a forward pass that reached these places."""
        self._step += 1
        missed = any(place not in came for place in self.places)
        for recording in self.recordings:
            recording.rows += 1
            if missed:
                recording.require(came)
            if recording.grows:
                self.cut(recording)

    def leave(self, recording: CaptureBuffer) -> None:
        """Copy out a buffer's rows and free its column; the last column moves there."""
        if recording not in self.recordings:
            return
        self.cut(recording)
        column, last = self.recordings.index(recording), self.recordings[-1]
        if last is not recording:
            self.cut(last)
            self.recordings[column] = last
        self.recordings.pop()
        self.places = places_of(self.recordings)

    def cut(self, recording: CaptureBuffer, host: Mapping[HookSite, torch.Tensor] | None = None) -> None:
        """Copy a buffer's gathered rows to it; without memory for them it stops recording.

        Args:
            recording: The buffer.
            host: The steps so far of all places on the host, so that a GPU sends each place's once.
        """
        ring = self._ring if host is None else host
        if recording.since < self._step:
            window = slice(recording.since, self._step)
            steps = self._step - recording.since
            first = recording.rows - steps
            recording.since = self._step
            column = self.recordings.index(recording)
            with recording.giving_up():
                for place in places_of([recording]):
                    if not place.grows:
                        recording.write(place, ring[place][window, column], first)
                recording.keep(first, steps)


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
