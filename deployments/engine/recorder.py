"""Recording activations: one read per point and step for the whole batch, cut to each request's rows."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

import torch

from deployments.activations.points import Place, Point
from deployments.activations.spec import Capture
from deployments.engine.request import Captured

WINDOW_BYTES = 32 << 20  # of the ring in which decoded rows gather before they are cut to requests
WINDOW_STEPS = 64
SPARE = WINDOW_STEPS  # rows beyond the last ones wanted that gather before they are dropped
Rows = dict[str, torch.Tensor]  # point name -> [rows, ...features], on the host
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class CaptureError(ValueError):
    """What was recorded cannot be given as asked; the message says why."""


class Recording:
    """What one request records, as it grows.

    Attributes:
        points: The points it reads.
        rows: How many tokens have passed, recorded or not wanted.
        since: The recorder's step from which on its rows are not cut out yet.
        bytes: Host memory that its rows take, until they are handed out.
        token_bytes: Bytes of one token's rows.
        reserve: The most bytes it holds until its end, where only the last rows are wanted; else 0.
    """

    def __init__(self, capture: Capture, points: Sequence[Point], prompt_tokens: int, max_tokens: int) -> None:
        """Hold nothing yet.

        Args:
            capture: What is asked for.
            points: Its points.
            prompt_tokens: The prompt's length.
            max_tokens: The most that are generated.
        """
        self.points = points
        self.rows = 0
        self.since = 0
        self.bytes = 0
        self.token_bytes = bytes_of_token(capture, points)
        self.reserve = bytes_until_end(capture, points, prompt_tokens + max_tokens)
        self._failed: str | None = None
        self._capture = capture
        self._prompt = prompt_tokens
        self._next = prompt_tokens if capture.tokens == "generated" else 0  # the first token not handed out
        self._pieces: dict[str, list[torch.Tensor]] = {point.name: [] for point in points}

    @property
    def wants_prompt(self) -> bool:
        """Whether rows of prompt tokens are kept."""
        return self._capture.tokens != "generated"

    @property
    def wants_generated(self) -> bool:
        """Whether rows of generated tokens are kept; then the last one is run through too."""
        return self._capture.tokens != "prompt" and self._capture.mode == "generate"

    def copy(self, place: Place, value: torch.Tensor) -> Rows:
        """Copy what is wanted of a place's rows [rows, ...] of consecutive tokens to the host."""
        tail = self._capture.tail
        kept = value[-tail:] if tail else value
        index = self._feature_index()
        return {
            point.name: kept.reshape(len(kept), *point.shape)[..., index].to("cpu", copy=True)
            for point in self.points
            if point.place is place
        }

    def add(self, rows: Rows) -> None:
        """Take what `copy` gave, which follows what was taken before."""
        if self._failed:
            return
        for name, value in rows.items():
            pieces = self._pieces[name]
            pieces.append(value)
            self.bytes += value.nbytes
            if (tail := self._capture.tail) and sum(map(len, pieces)) > tail + SPARE:
                self.bytes -= sum(piece.nbytes for piece in pieces)
                pieces[:] = [torch.cat(pieces)[-tail:].clone()]
                self.bytes += pieces[0].nbytes

    def require(self, came: Collection[Place]) -> None:
        """Give up where a forward has not come to a place that is read."""
        if missed := sorted({point.module for point in self.points if point.place not in came}):
            self.give_up(f"a forward never came to {', '.join(missed)}")

    def flush(self, sequence: Sequence[int]) -> Captured | None:
        """Hand out the rows gathered so far; None where there are none, or only the last ones are wanted.

        Args:
            sequence: The token ids of prompt and generation.

        Raises:
            CaptureError: A value has no finite float16, and that was asked for.
        """
        if self._capture.tail or not self.bytes:
            return None
        gathered = sum(map(len, next(iter(self._pieces.values()))))
        return self._hand_out(self._next, self._next + gathered, sequence)

    def finish(self, sequence: Sequence[int]) -> Captured:
        """The rows of a request that has come to its end, but for those that were handed out before.

        Args:
            sequence: The token ids of prompt and generation.

        Raises:
            CaptureError: A value has no finite float16, and that was asked for.
        """
        if self._failed:
            raise CaptureError(self._failed)
        stop = len(sequence) if self.wants_generated else self._prompt
        first = max(0, stop - self._capture.tail) if self._capture.tail else min(self._next, stop)
        return self._hand_out(first, stop, sequence)

    def give_up(self, reason: str) -> None:
        """Keep no more rows; `finish` says why."""
        self._failed = reason
        for pieces in self._pieces.values():
            pieces.clear()
        self.bytes = 0

    def _hand_out(self, first: int, stop: int, sequence: Sequence[int]) -> Captured:
        values = {name: self._join(name, pieces, stop - first) for name, pieces in self._pieces.items()}
        for pieces in self._pieces.values():
            pieces.clear()
        self.bytes = 0
        self._next = stop
        return Captured(range(first, stop), sequence[first:stop], values)

    def _join(self, name: str, pieces: list[torch.Tensor], rows: int) -> torch.Tensor:
        if not rows:
            point = next(point for point in self.points if point.name == name)
            return torch.empty(0, *point.shape, dtype=DTYPES.get(self._capture.dtype, point.place.dtype))[
                ..., self._feature_index()
            ]
        joined = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        if self._capture.tail:
            joined = joined[-rows:]
        assert len(joined) == rows, f"{name}: {len(joined)} rows recorded of {rows}"
        dtype = DTYPES.get(self._capture.dtype, joined.dtype)
        cast = joined.to(dtype)
        if dtype == torch.float16 and bool((cast.isinf() & ~joined.isinf()).any()):
            raise CaptureError(f"{name} has values beyond float16's 65504; ask for bfloat16 or float32")
        return cast.contiguous()

    def _feature_index(self) -> slice | list[int]:
        features = self._capture.features
        if features is None:
            return slice(None)
        return features.index if features.index else slice(features.first)


def bytes_of_token(capture: Capture, points: Iterable[Point]) -> int:
    """Bytes of one token's rows, in the model's dtype or the one asked for, whichever is larger."""
    asked = DTYPES.get(capture.dtype)
    sizes = ((max(point.place.dtype.itemsize, asked.itemsize if asked else 0), point.shape) for point in points)
    return sum(size * capture.values_of(shape) for size, shape in sizes)


def bytes_until_end(capture: Capture, points: Iterable[Point], tokens: int) -> int:
    """The most bytes held until the end of so many tokens: which rows are the last is known only then."""
    return min(capture.tail + SPARE, tokens) * bytes_of_token(capture, points) if capture.tail else 0


def joined(parts: Sequence[Captured]) -> Captured:
    """Rows that were handed out one part after the other, as one."""
    if len(parts) == 1:
        return parts[0]
    values = {name: torch.cat([part.values[name] for part in parts]) for name in parts[0].values}
    token_ids = [token for part in parts for token in part.token_ids]
    return Captured(range(parts[0].positions.start, parts[-1].positions.stop), token_ids, values)


def places_of(recordings: Iterable[Recording]) -> list[Place]:
    """What these read, in the order of execution."""
    places = {point.place for recording in recordings for point in recording.points}
    return sorted(places, key=lambda place: place.order)


class Recorder:
    """Gathers decoded rows of all recording requests in a ring on the model's device.

    Each step writes one [batch, ...] block per place; a request's rows are cut out when the ring is full,
    when the request changes its slot or ends. So a step costs one copy per place, however many requests
    record, and tensors leave the device once per window.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ring: dict[Place, torch.Tensor] = {}  # [steps, slots, ...]
        self._steps = 0
        self._step = 0
        self._places: list[Place] = []  # that the running requests read, in the order of execution
        self._came: set[Place] = set()  # in this step
        self.recordings: dict[int, Recording] = {}  # slot -> the running request that records decoded rows

    def places(self) -> list[Place]:
        """What the next decode reads."""
        return self._places

    def begin(self, places: Sequence[Place], slots: int) -> None:
        """Make room for one more step of these places."""
        self._came.clear()
        fits = all(place in self._ring and self._ring[place].shape[1] >= slots for place in places)
        if fits and self._step < self._steps:
            return
        for slot in self.recordings:
            self.cut(slot)
        self._step = 0
        for recording in self.recordings.values():
            recording.since = 0
        if not fits:
            step_bytes = slots * sum(math.prod(place.shape) * place.dtype.itemsize for place in places)
            steps = max(1, min(WINDOW_STEPS, WINDOW_BYTES // step_bytes))
            self._ring, self._steps = {}, 0  # the old one goes before the new one comes
            self._ring = {
                place: torch.empty(steps, slots, *place.shape, dtype=place.dtype, device=self._device)
                for place in places
            }
            self._steps = steps

    def take(self, place: Place, value: torch.Tensor) -> None:
        """Copy a decode's value [batch, 1, ...]; modules may write over theirs afterwards."""
        self._ring[place][self._step, : len(value)] = value.view(len(value), *place.shape)
        self._came.add(place)

    def end(self) -> None:
        """Close the step."""
        self._step += 1
        for recording in self.recordings.values():
            recording.rows += 1
            if len(self._came) < len(self._places):
                recording.require(self._came)

    def join(self, slot: int, recording: Recording) -> None:
        """Record a slot from the next step on."""
        recording.since = self._step
        self.recordings[slot] = recording
        self._places = places_of(self.recordings.values())

    def leave(self, slot: int) -> Recording | None:
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
            places = {point.place for point in recording.points}
            window = slice(recording.since, self._step)
            recording.since = self._step
            try:
                for place in places:
                    recording.add(recording.copy(place, self._ring[place][window, slot]))
            except (RuntimeError, MemoryError) as error:
                recording.give_up(str(error))
