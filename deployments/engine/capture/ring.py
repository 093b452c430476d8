"""Recording activations: one read per point and step for the whole batch, cut to each sequence's rows."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence

import torch

from deployments.engine.capture.buffer import CaptureBuffer
from deployments.engine.capture.row_sizes import SPARE_ROWS
from deployments.places.place import Place

WINDOW_BYTES = 32 << 20  # of the ring in which decoded rows gather before they are cut to requests, on a CPU
GPU_PART = 128  # of a GPU's memory, one part is the ring's: each window costs a copy for each request and place
BUDGET_PART = 4  # of a CPU's memory for recorded rows, the ring takes no more than one part beside it
WINDOW_STEPS = SPARE_ROWS  # of a request for its last rows, what a window brings is spare


def window_bytes(device: torch.device, budget: int | None) -> int:
    """Bytes of a device's ring.

    Args:
        device: The device.
        budget: Bytes of host memory for recorded rows; None for any number.
    """
    if device.type == "cuda":
        return max(WINDOW_BYTES, torch.cuda.mem_get_info(device)[1] // GPU_PART)
    return WINDOW_BYTES if budget is None else min(WINDOW_BYTES, budget // BUDGET_PART)


def places_of(recordings: Iterable[CaptureBuffer]) -> list[Place]:
    """What these read, in the order of execution."""
    places = {point.place for recording in recordings for point in recording.points}
    return sorted(places, key=lambda place: place.order)


class CaptureRing:
    """Gathers decoded rows of all recording sequences in a ring on the model's device.

    Each step writes one [sequences, ...] block per place; a sequence's rows are cut out when the ring is full, or when
    the sequence leaves. So a step costs one copy per place, however many sequences record, and tensors leave the device
    once per window. Attention patterns, of another width in each step, leave it in that step, and so do the other rows
    of who records them.

    Attributes:
        recordings: Those whose rows the next forward brings, by their column.
    """

    def __init__(self, device: torch.device, window: int) -> None:
        """Initialize a ring without rows.

        Args:
            device: Where the rows are.
            window: Bytes of those that gather, or of one step's where these are more.
        """
        self._device = device
        self._window = window
        self._ring: dict[Place, torch.Tensor] = {}  # [steps, columns, ...]
        self._steps = 0
        self._step = 0
        self._places: list[Place] = []  # that these read, in the order of execution
        self.recordings: list[CaptureBuffer] = []

    def places(self) -> list[Place]:
        """What the next forward reads."""
        return self._places

    def arrange(self, decoding: Sequence[CaptureBuffer]) -> Sequence[CaptureBuffer]:
        """Have columns for those whose rows the next forward brings, and for no others.

        Returns:
            These, by their column; who was there keeps it as far as can be.
        """
        coming, here = set(decoding), set(self.recordings)
        if coming == here:
            return self.recordings
        for recording in [one for one in self.recordings if one not in coming]:
            self.leave(recording)
        for recording in decoding:
            if recording not in here:
                recording.since = self._step
                self.recordings.append(recording)
        self._places = places_of(self.recordings)
        return self.recordings

    def begin(self) -> None:
        """Make room for one more step."""
        columns, places = len(self.recordings), [place for place in self._places if not place.grows]
        fits = all(place in self._ring and self._ring[place].shape[1] >= columns for place in places)
        if fits and self._step < self._steps:
            return
        for recording in self.recordings:
            self.cut(recording)
            recording.since = 0
        self._step = 0
        if not fits:
            columns = 1 << (columns - 1).bit_length()  # room for those that join
            step_bytes = columns * sum(math.prod(place.shape) * place.dtype.itemsize for place in places)
            steps = max(1, min(WINDOW_STEPS, self._window // step_bytes))
            self._ring, self._steps = {}, 0  # the old one goes before the new one comes
            self._ring = {
                place: torch.empty(steps, columns, *place.shape, dtype=place.dtype, device=self._device)
                for place in places
            }
            self._steps = steps

    def take(self, place: Place, value: torch.Tensor) -> None:
        """Copy a place's rows [columns, ...]. Modules may write over theirs afterwards."""
        self._ring[place][self._step, : len(value)] = value

    def take_patterns(self, place: Place, shown: Iterator[torch.Tensor]) -> None:
        """Copy attention patterns, [1, heads, keys] of each sequence that reads them: at once.

        A row's way costs more than its bytes.
        """
        for recording in self.recordings:
            if recording.reads(place):
                with recording.giving_up():
                    recording.write(place, next(shown).cpu(), recording.rows)

    def end(self, came: Collection[Place]) -> None:
        """Close the step of a forward that came to these places."""
        self._step += 1
        missed = any(place not in came for place in self._places)
        for recording in self.recordings:
            recording.rows += 1
            if missed:
                recording.require(came)
            if recording.grows:
                self.cut(recording)

    def leave(self, recording: CaptureBuffer) -> None:
        """Cut out what a recording has here, and hold no column for it; the last one moves into its place."""
        if recording not in self.recordings:
            return
        self.cut(recording)
        column, last = self.recordings.index(recording), self.recordings[-1]
        if last is not recording:
            self.cut(last)
            self.recordings[column] = last
        self.recordings.pop()
        self._places = places_of(self.recordings)

    def cut(self, recording: CaptureBuffer) -> None:
        """Hand a recording its gathered rows; it gives up where there is no memory for them."""
        if recording.since < self._step:
            window = slice(recording.since, self._step)
            steps = self._step - recording.since
            first = recording.rows - steps
            recording.since = self._step
            column = self.recordings.index(recording)
            with recording.giving_up():
                for place in places_of([recording]):
                    if not place.grows:
                        recording.write(place, self._ring[place][window, column], first)
                recording.keep(first, steps)
