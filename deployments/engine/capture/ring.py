"""Decoded rows on their way from forward passes to the buffers: each place is read once for the whole batch.

They gather on the model's device over the steps of a window, and are then cut into the requests' buffers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

import torch

from deployments.engine.capture.buffer import CaptureBuffer
from deployments.engine.capture.row_sizes import SPARE_ROWS
from deployments.engine.capture.worker import Worker
from deployments.places.hook_site import HookSite

WINDOW_BYTES = 32 << 20  # on a CPU: size of the window in which decoded rows gather before they are split by request
GPU_PART = 256  # on a GPU: its memory divided by this is a window's size; a window costs a copy for each request
BUDGET_PART = 4  # the memory for recorded rows divided by this is the most of all windows, in addition to that memory
WINDOW_STEPS = SPARE_ROWS  # for a request for its last rows, all rows of a window are spare


def window_bytes(device: torch.device, budget: int | None) -> int:
    """Bytes of a window on a device, with `budget` bytes of host memory for recorded rows; None for no limit.

    A GPU has two windows, each with a mirror in host memory.
    """
    window, windows = WINDOW_BYTES, 1
    if device.type == "cuda":
        window, windows = max(window, torch.cuda.mem_get_info(device)[1] // GPU_PART), 2
    return window if budget is None else min(window, budget // BUDGET_PART // windows)


def places_of(recordings: Iterable[CaptureBuffer]) -> list[HookSite]:
    """The places that these buffers read, in the order of execution."""
    different = {recording.names: recording for recording in recordings}.values()
    places = {point.place for recording in different for point in recording.points}
    return sorted(places, key=lambda place: place.order)


class Segment(NamedTuple):
    """Consecutive rows of one buffer in a window: a column's steps [start, stop), from the token at `first` on."""

    recording: CaptureBuffer
    column: int
    start: int
    stop: int
    first: int


class Window:
    """The rows of some steps on the model's device, with a mirror in pinned host memory; a CPU's is its own mirror.

    Attributes:
        index: Each place's index in its block.
        steps: The number of steps.
        blocks: For each dtype and shape [steps, places, columns, ...].
        mirror: The same on the host.
        sent: The number of steps that are copied to the mirror.
        cut: The last job that reads the mirror.
    """

    def __init__(self, places: Sequence[HookSite], columns: int, size: int, device: torch.device) -> None:
        """Allocate at most `size` bytes, or one step."""
        self._columns = columns
        self._kinds: dict[tuple[torch.dtype, tuple[int, ...]], list[HookSite]] = {}
        for place in places:
            self._kinds.setdefault((place.dtype, place.shape), []).append(place)
        self.index = {place: i for alike in self._kinds.values() for i, place in enumerate(alike)}
        step_bytes = columns * sum(math.prod(place.shape) * place.dtype.itemsize for place in places)
        self.steps = max(1, min(WINDOW_STEPS, size // max(1, step_bytes)))
        self.blocks = {
            (dtype, shape): torch.empty(self.steps, len(alike), columns, *shape, dtype=dtype, device=device)
            for (dtype, shape), alike in self._kinds.items()
        }
        self.mirror = {kind: pinned_like(rows) if rows.is_cuda else rows for kind, rows in self.blocks.items()}
        self.sent = 0
        self.cut: Future[None] | None = None

    def fits(self, places: Sequence[HookSite], columns: int) -> bool:
        """Whether it has space for so many rows of these places."""
        return columns <= self._columns and all(place in self.index for place in places)

    def slots(self, step: int, columns: int) -> dict[HookSite, torch.Tensor]:
        """The memory of each place in a step, `[columns, ...]`."""
        slots = dict[HookSite, torch.Tensor]()
        for kind, places in self._kinds.items():
            slots.update(zip(places, self.blocks[kind][step, :, :columns].unbind(), strict=True))
        return slots


class CaptureRing:
    """Gathers decoded rows of all recording sequences in windows on the model's device.

    Each step writes one [sequences, ...] block for each place. A step therefore costs one copy for each place, however
    many sequences record. When a window is full, or when a sequence that has left needs its rows, a side stream copies
    the steps to the host, and the worker cuts them into the buffers. Two windows take turns, so that a step waits only
    where both are full. Inline on a CPU, one window is cut at once. Attention patterns have another width in each step,
    so they leave the device in that step, together with the other rows of the same sequence.

    `take` and `end` need nothing of a step but that it has been launched.

    Attributes:
        worker: Changes the buffers.
        device: The model's device.
        prompts: The last job that brings gathered prompts' rows to their buffers.
        recordings: The buffers that record the next forward pass, by their column.
        places: The places that they read, in the order of execution.
    """

    def __init__(self, device: torch.device, window: int, worker: Worker) -> None:
        """Initialize an empty ring.

        Args:
            device: The device of the rows.
            window: A window's size in bytes; one step's rows if those are larger.
            worker: Changes the buffers; on a GPU a threaded one.
        """
        self._size = window
        self.worker = worker
        self.device = device
        self.prompts: Future[None] | None = None
        self.recordings: list[CaptureBuffer] = []
        self.places: list[HookSite] = []
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        # The first is being filled.
        self._windows = [Window([], 0, 0, device) for _ in range(2 if worker.threaded else 1)]
        self._slots: dict[HookSite, torch.Tensor] = {}  # of this step, [columns, ...]
        self._step = 0
        self._closed: list[Segment] = []  # not given to the worker yet

    def arrange(self, decoding: Sequence[CaptureBuffer]) -> Sequence[CaptureBuffer]:
        """Assign columns to exactly these buffers for the next forward pass; return them by their column."""
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
        """Make room for one more step. This waits if the worker has not cut the next window's earlier rows yet."""
        columns, places = len(self.recordings), [place for place in self.places if not place.grows]
        if self._step == self._windows[0].steps or not self._windows[0].fits(places, columns):
            self._turn(places, columns)
        self._slots = self._windows[0].slots(self._step, columns)

    def _turn(self, places: Sequence[HookSite], columns: int) -> None:
        """Begin the next window, for these places and at least so many columns."""
        for column in range(len(self.recordings)):
            self._close(column)
        self.send()
        self._windows.append(self._windows.pop(0))
        window = self._windows[0]
        self.worker.wait(window.cut)
        self._step = window.sent = 0
        for recording in self.recordings:
            recording.since = 0
        stale = self._stream and len(places) != len(window.index)  # of no use on the way to the host
        if stale or not window.fits(places, columns):
            columns = 1 << (columns - 1).bit_length()  # space for sequences that join
            window = self._windows[0] = Window([], 0, 0, self.device)  # free the old one before the allocation
            self._windows[0] = Window(places, columns, self._size, self.device)

    def take(self, values: Mapping[HookSite, torch.Tensor]) -> None:
        """Copy the first rows of places' values [rows, ...], by column; the model may overwrite them later."""
        slots = [self._slots[place] for place in values]
        rows = [value[: len(slot)] for slot, value in zip(slots, values.values(), strict=True)]
        torch._foreach_copy_(slots, rows)  # on a GPU one kernel for places of one dtype

    def end(self, came: Collection[HookSite]) -> None:
        """Close the step of a forward pass that reached these places."""
        self._step += 1
        missed = any(place not in came for place in self.places)
        for column, recording in enumerate(self.recordings):
            recording.rows += 1
            if missed:
                self.worker.run(partial(recording.require, came))
            if recording.grows:
                self._close(column)
        if any(recording.grows for recording in self.recordings):
            self.send()

    def undo(self) -> None:
        """Drop the rows of the last step, directly after its `end`; a step that recorded none had no `end`."""
        self._step -= bool(self.recordings)
        for recording in self.recordings:
            recording.rows -= 1

    def leave(self, recording: CaptureBuffer, tokens: int | None = None) -> None:
        """Free a buffer's column if it has one; the last column moves there, and `send` brings its rows to it.

        Rows of tokens after the first `tokens` of its sequence are dropped.
        """
        if recording not in self.recordings:
            return
        column, last = self.recordings.index(recording), len(self.recordings) - 1
        self._close(column, tokens)
        if column != last:
            self._close(last)
            self.recordings[column] = self.recordings[last]
        self.recordings.pop()
        self.places = places_of(self.recordings)

    def send(self, needed: Collection[CaptureBuffer] | None = None) -> None:
        """Bring the rows of buffers that have left to them, if one of `needed` waits for rows; None for any."""
        if not any(needed is None or segment.recording in needed for segment in self._closed):
            return
        window, closed, copied = self._windows[0], self._closed, None
        self._closed = []
        if window.sent < self._step:
            steps = slice(window.sent, self._step)
            rows, mirror = ([block[steps] for block in of.values()] for of in (window.blocks, window.mirror))
            _, copied = self.to_host(rows, mirror)
            window.sent = self._step
        window.cut = self.worker.run(partial(_cut, window, closed, copied))

    def to_host(
        self, rows: Sequence[torch.Tensor], mirror: Sequence[torch.Tensor] | None = None
    ) -> tuple[Sequence[torch.Tensor], torch.cuda.Event | None]:
        """Copy tensors to pinned ones by the side stream, after the work launched so far. Not run on a GPU yet.

        Return the tensors on the host, and their arrival there; on a CPU the given ones.
        """
        if self._stream is None:
            return rows, None
        mirror = mirror or [pinned_like(row) for row in rows]
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            for row, host in zip(rows, mirror, strict=True):
                row.record_stream(self._stream)
                host.copy_(row, non_blocking=True)
            copied.record(self._stream)
        return mirror, copied

    def _close(self, column: int, tokens: int | None = None) -> None:
        """End a column's segment after the last step; the next segment begins there."""
        recording = self.recordings[column]
        start, recording.since = recording.since, self._step
        first = recording.rows - (self._step - start)
        stop = self._step if tokens is None else min(self._step, start + tokens - first)
        if start < stop:
            self._closed.append(Segment(recording, column, start, stop, first))


def _cut(window: Window, segments: Iterable[Segment], copied: torch.cuda.Event | None) -> None:
    """Copy rows of a window to their buffers once they are there; a buffer without memory for them stops recording."""
    if copied is not None:
        copied.synchronize()
    for recording, column, start, stop, first in segments:
        with recording.giving_up():
            parts = list[torch.Tensor]()
            if wanted := recording.wanted(first, stop - start):
                at = _dense([start + position - first for position in wanted])
                for (dtype, shape, own), points in recording.kinds.items():
                    places = _dense([window.index[point.place] for point in points])
                    rows = window.mirror[dtype, shape][:, :, column][at][:, places]
                    rows = recording.chosen(rows.reshape(*rows.shape[:2], *own), own)
                    parts.append(rows.transpose(0, 1))
            recording.fill(first, stop - start, parts)


def _dense(indices: list[int]) -> slice | list[int]:
    """Ascending indices as a slice, if they are consecutive: a view, not a copy."""
    first, stop = indices[0], indices[-1] + 1
    return slice(first, stop) if indices == [*range(first, stop)] else indices


def pinned_like(rows: torch.Tensor) -> torch.Tensor:
    """Pinned host memory for a GPU's rows. Not run on a GPU yet."""
    return torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
