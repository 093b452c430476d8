"""The recorded rows of one forward pass: decoded ones go through the ring, and prompts' are gathered within it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from deployments.engine.capture.buffer import CaptureBuffer
from deployments.engine.capture.ring import CaptureRing, places_of
from deployments.engine.scheduler import Chunk
from deployments.places.hook_site import HookSite


class ChunkRows(NamedTuple):
    """Rows of consecutive tokens of one buffer in a forward pass, recorded or not."""

    recording: CaptureBuffer
    row: int  # the first one's index in the forward pass
    start: int  # the position of its token
    tokens: int

    @classmethod
    def of(cls, recording: CaptureBuffer, chunk: Chunk) -> ChunkRows:
        """Those of a chunk's tokens that its buffer has not processed yet."""
        known = min(chunk.count, max(0, recording.rows - chunk.start))
        return cls(recording, chunk.row + known, chunk.start + known, chunk.count - known)


class Gathering:
    """The recorded rows of prompts that record the same part of each row, in one forward pass.

    A step costs one read for each place and a few copies for each request, not a copy for each place of each request.
    On a GPU all rows of the same dtype and shape leave it together.
    """

    def __init__(self, prompts: Sequence[ChunkRows], device: torch.device) -> None:
        """Allocate memory for the wanted rows of prompts whose buffers are alike."""
        self._prompts = prompts
        self._first = prompts[0].recording
        wanted = [recording.wanted(start, tokens) for recording, _, start, tokens in prompts]
        self._counts = [len(positions) for positions in wanted]
        rows = [
            row + position - start
            for (_, row, start, _), positions in zip(prompts, wanted, strict=True)
            for position in positions
        ]
        self._rows = {device: torch.tensor(rows, device=device)}  # on each device of the model
        self._stacks: Sequence[torch.Tensor] = self._first.empty(len(rows), device)
        self._values = {
            point.name: own
            for points, stack in zip(self._first.kinds.values(), self._stacks, strict=True)
            for point, own in zip(points, stack, strict=True)
        }
        self._copied: torch.cuda.Event | None = None

    def take(self, place: HookSite, value: torch.Tensor) -> None:
        """Read the rows of a place's value [rows, ...]; the model may overwrite them later."""
        for point in self._first.at(place):
            if value.device not in self._rows:
                self._rows[value.device] = next(iter(self._rows.values())).to(value.device)
            chosen = self._first.chosen(value.reshape(len(value), *point.shape), point.shape)
            self._values[point.name].copy_(chosen.index_select(0, self._rows[value.device]))

    def send(self, ring: CaptureRing) -> None:
        """Send the rows to the host. This takes memory, and changes no buffer."""
        self._values.clear()
        self._stacks, self._copied = ring.to_host(self._stacks)

    def split(self) -> None:
        """Copy the rows to their buffers, a job of the worker."""
        if self._copied:
            self._copied.synchronize()
        parts = zip(*(torch.split(stack, self._counts, 1) for stack in self._stacks), strict=True)
        for recording, _, start, tokens in self._prompts:
            with recording.giving_up():
                recording.fill(start, tokens, next(parts, ()))


class ForwardCapture:
    """Records one forward pass.

    Single decoded rows go through the ring, prompts' rows are gathered, and attention patterns are copied one by one.
    The buffers change by jobs of the ring's worker.

    Attributes:
        places: The places to read.
        readers: For each place of attention patterns, the spans that are read.
    """

    def __init__(self, ring: CaptureRing, chunks: Sequence[Chunk]) -> None:
        """Choose the rows; the first chunks are those of the ring's buffers, by column. Make room for a step there."""
        self._ring = ring
        decoding = len(ring.recordings)
        indexed = [
            (index, ChunkRows.of(recording, chunk))
            for index, chunk in enumerate(chunks)
            if (recording := chunk.sequence.recording)
            if index < decoding or chunk.sequence.records_prefill
        ]
        self._rows = [rows for _, rows in indexed]
        alike = dict[Hashable, list[ChunkRows]]()
        for rows in self._rows[decoding:]:
            if rows.recording.wanted(rows.start, rows.tokens):
                alike.setdefault(rows.recording.alike, []).append(rows)
        self._gathered = [Gathering(prompts, ring.device) for prompts in alike.values()]
        self._came = set[HookSite]()
        self._prompts = [rows.recording for rows in self._rows[decoding:]]
        self._ringing = set(ring.places)
        self.places = [*ring.places, *(place for place in places_of(self._prompts) if place not in self._ringing)]
        self.readers = {
            place: [index for index, rows in indexed if rows.recording.at(place)]
            for place in self.places
            if place.grows
        }
        ring.send(self._prompts)  # decoded before they were preempted: these rows come first
        if ring.recordings:
            ring.begin()

    def take(self, place: HookSite, value: Any) -> None:
        """Copy the recorded rows of a place's value [rows, ...]; for patterns, a list of [tokens, heads, keys]."""
        self._came.add(place)
        if place.grows:
            readers = [rows for rows in self._rows if rows.recording.at(place)]
            for rows, patterns in zip(readers, value, strict=True):
                self._take_patterns(rows, place, patterns)
            return
        if place in self._ringing:
            self._ring.take({place: value})
        for gathered in self._gathered:
            gathered.take(place, value)

    def _take_patterns(self, rows: ChunkRows, place: HookSite, value: torch.Tensor) -> None:
        recording, _, start, tokens = rows
        if wanted := recording.wanted(start, tokens):
            value = value[len(value) - tokens + wanted[0] - start : len(value) - tokens + wanted[-1] + 1 - start]
            if self._ring.worker.threaded:
                value = value.to("cpu", copy=True)
            self._ring.worker.run(partial(recording.write, place, value, wanted[0]))

    def take_staged(self, values: Mapping[HookSite, torch.Tensor]) -> None:
        """Copy the recorded rows of a decode step with memory at fixed addresses.

        Args:
            values: [rows, ...] of each place that the forward pass reached.
        """
        self._came.update(values)
        if ringing := {place: value for place, value in values.items() if place in self._ringing}:
            self._ring.take(ringing)

    def send(self) -> None:
        """Send gathered rows to the host, once those of the last prompts are in their buffers."""
        if self._gathered:
            self._ring.worker.wait(self._ring.prompts)
        for gathered in self._gathered:
            gathered.send(self._ring)

    def keep(self) -> None:
        """Count the rows of a forward pass that was launched without an error."""
        if self._prompts:
            self._ring.prompts = self._ring.worker.run(self._keep_prompts)
        if self._ring.recordings:
            self._ring.end(self._came)

    def _keep_prompts(self) -> None:
        for recording in self._prompts:
            recording.require(self._came)
        for gathered in self._gathered:
            gathered.split()
