"""Recording activations: one read per point and step for the whole batch, cut to each request's rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from deployments.engine.capture.buffer import CaptureBuffer
from deployments.engine.capture.row_sizes import SPARE_ROWS
from deployments.places.place import Place

WINDOW_BYTES = 32 << 20  # of the ring in which decoded rows gather before they are cut to requests
WINDOW_STEPS = SPARE_ROWS  # of a request for its last rows, what a window brings is spare


def places_of(recordings: Iterable[CaptureBuffer]) -> list[Place]:
    """What these read, in the order of execution."""
    places = {point.place for recording in recordings for point in recording.points}
    return sorted(places, key=lambda place: place.order)


class CaptureRing:
    """Gathers decoded rows of all recording requests in a ring on the model's device.

    Each step writes one [batch, ...] block per place; a request's rows are cut out when the ring is full,
    when the request changes its slot or ends. So a step costs one copy per place, however many requests
    record, and tensors leave the device once per window. Attention patterns, of another width in each step,
    leave it in that step, and so do the other rows of who records them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ring: dict[Place, torch.Tensor] = {}  # [steps, slots, ...]
        self._steps = 0
        self._step = 0
        self._places: list[Place] = []  # that the running requests read, in the order of execution
        self._came: set[Place] = set()  # in this step
        self.recordings: dict[int, CaptureBuffer] = {}  # slot -> the running request that records decoded rows

    def places(self) -> list[Place]:
        """What the next decode reads."""
        return self._places

    def readers(self, place: Place) -> list[int]:
        """The slots that record what is there, in ascending order."""
        return sorted(slot for slot, recording in self.recordings.items() if recording.reads(place))

    def begin(self, places: Sequence[Place], slots: int) -> None:
        """Make room for one more step of these places."""
        self._came.clear()
        fits = all((place in self._ring and self._ring[place].shape[1] >= slots) or place.grows for place in places)
        if fits and self._step < self._steps:
            return
        for slot in self.recordings:
            self.cut(slot)
        self._step = 0
        for recording in self.recordings.values():
            recording.since = 0
        if not fits:
            places = [place for place in places if not place.grows]
            step_bytes = slots * sum(math.prod(place.shape) * place.dtype.itemsize for place in places)
            steps = max(1, min(WINDOW_STEPS, WINDOW_BYTES // step_bytes))
            self._ring, self._steps = {}, 0  # the old one goes before the new one comes
            self._ring = {
                place: torch.empty(steps, slots, *place.shape, dtype=place.dtype, device=self._device)
                for place in places
            }
            self._steps = steps

    def take(self, place: Place, value: torch.Tensor) -> None:
        """Copy a decode's value [batch, 1, ...], of attention patterns [readers, 1, heads, keys].

        Modules may write over theirs afterwards.
        """
        self._came.add(place)
        if place.grows:
            slots = self.readers(place)
            try:
                rows = value.cpu()  # at once: a row's way costs more than its bytes
            except (RuntimeError, MemoryError) as error:
                for slot in slots:
                    self.recordings[slot].give_up(str(error))
                return
            for slot, row in zip(slots, rows, strict=True):
                with self.recordings[slot].giving_up():
                    self.recordings[slot].write(place, row, self.recordings[slot].rows)
        else:
            self._ring[place][self._step, : len(value)] = value.view(len(value), *place.shape)

    def end(self) -> None:
        """Close the step."""
        self._step += 1
        for slot, recording in self.recordings.items():
            recording.rows += 1
            if len(self._came) < len(self._places):
                recording.require(self._came)
            if recording.grows:
                self.cut(slot)

    def join(self, slot: int, recording: CaptureBuffer) -> None:
        """Record a slot from the next step on."""
        recording.since = self._step
        self.recordings[slot] = recording
        self._places = places_of(self.recordings.values())

    def leave(self, slot: int) -> CaptureBuffer | None:
        """Cut out a slot's rows and record it no more; gives what was recorded there."""
        self.cut(slot)
        recording = self.recordings.pop(slot, None)
        if recording is not None:
            self._places = places_of(self.recordings.values())
        return recording

    def swap(self, a: int, b: int) -> None:
        """Follow two requests that change places."""
        moving = (b, self.leave(a)), (a, self.leave(b))
        for slot, recording in moving:
            if recording is not None:
                self.join(slot, recording)

    def cut(self, slot: int) -> None:
        """Hand a slot's gathered rows to its recording, which gives up where there is no memory for them."""
        recording = self.recordings.get(slot)
        if recording is not None and recording.since < self._step:
            window = slice(recording.since, self._step)
            steps = self._step - recording.since
            first = recording.rows - steps
            recording.since = self._step
            with recording.giving_up():
                for place in places_of([recording]):
                    if not place.grows:
                        recording.write(place, self._ring[place][window, slot], first)
                recording.keep(first, steps)
