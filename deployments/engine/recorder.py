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
PIECE_BYTES = 16 << 20  # at most, after which rows go out
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class CaptureError(ValueError):
    """What was recorded cannot be given as asked; the message says why."""


class Recording:
    """What one request records, as it grows.

    Each point's rows lie one behind the other in a buffer of their own on the host, and are handed out as they lie.

    Attributes:
        points: The points it reads.
        rows: How many tokens have passed, recorded or not wanted.
        since: The recorder's step from which on its rows are not cut out yet.
        bytes: Host memory that its rows take, until they are handed out.
        piece_bytes: How many make it hand them out; None where they stay with it until its end.
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
        self.piece_bytes: int | None = None
        self.token_bytes = bytes_of_token(capture, points)
        self.reserve = bytes_until_end(capture, points, prompt_tokens + max_tokens)
        self._failed: str | None = None
        self._capture = capture
        self._prompt = prompt_tokens
        self._stop = prompt_tokens + (max_tokens if self.wants_generated else 0)  # no token behind it is recorded
        self._next = prompt_tokens if capture.tokens == "generated" else 0  # the first token not handed out
        self._buffers: dict[str, torch.Tensor] = {}  # point name -> [rows that fit, ...features]
        self._filled = 0  # rows in each of them
        self._at: dict[Place, list[Point]] = {}
        for point in points:
            self._at.setdefault(point.place, []).append(point)

    @property
    def wants_prompt(self) -> bool:
        """Whether rows of prompt tokens are kept."""
        return self._capture.tokens != "generated"

    @property
    def wants_generated(self) -> bool:
        """Whether rows of generated tokens are kept; then the last one is run through too."""
        return self._capture.tokens != "prompt" and self._capture.mode == "generate"

    def write(self, place: Place, value: torch.Tensor) -> None:
        """Copy what is wanted of a place's rows [rows, ...] of consecutive tokens; it counts when `keep` says so."""
        if self._failed or place not in self._at or not len(value):
            return
        value = value[-self._capture.tail :] if self._capture.tail else value
        stop = self._filled + len(value)
        self._make_room(stop)
        for point in self._at[place]:
            rows = value.reshape(len(value), *point.shape)[..., self._features]
            self._buffers[point.name][self._filled : stop] = rows

    def keep(self, rows: int) -> None:
        """Count rows that were written for every place, which follow those that counted before."""
        if self._failed or not self._buffers:
            return
        tail = self._capture.tail
        self._filled += min(rows, tail) if tail else rows
        if tail and self._filled > tail + SPARE:
            last = {name: buffer[self._filled - tail : self._filled].clone() for name, buffer in self._buffers.items()}
            for name, rows_of in last.items():
                self._buffers[name][:tail] = rows_of
            self._filled = tail
        self.bytes = self._filled * sum(buffer[:1].nbytes for buffer in self._buffers.values())

    def require(self, came: Collection[Place]) -> None:
        """Give up where a forward has not come to a place that is read."""
        if missed := sorted({point.module for point in self.points if point.place not in came}):
            self.give_up(f"a forward never came to {', '.join(missed)}")

    def flush(self, sequence: Sequence[int]) -> Captured | None:
        """Hand out the rows gathered so far; None where they are too few, or only the last ones are wanted.

        Args:
            sequence: The token ids of prompt and generation.

        Raises:
            CaptureError: A value has no finite float16, and that was asked for.
        """
        if self._capture.tail or not self.bytes or self.piece_bytes is None or self.bytes < self.piece_bytes:
            return None
        return self._hand_out(self._next, self._next + self._filled, sequence)

    def finish(self, sequence: Sequence[int]) -> Captured:
        """The rows of a request that has come to its end, but for those that were handed out before.

        Args:
            sequence: The token ids of prompt and generation.

        Raises:
            CaptureError: A value has no finite float16, and that was asked for; there was no memory for the rows,
                or a forward did not come to all places.
        """
        if self._failed:
            raise CaptureError(self._failed)
        stop = len(sequence) if self.wants_generated else self._prompt
        first = max(0, stop - self._capture.tail) if self._capture.tail else min(self._next, stop)
        return self._hand_out(first, stop, sequence)

    def give_up(self, reason: str) -> None:
        """Keep no more rows; `finish` says why."""
        self._failed = reason
        self._let_go()

    def _hand_out(self, first: int, stop: int, sequence: Sequence[int]) -> Captured:
        rows = stop - first
        assert rows <= self._filled if self._capture.tail else rows == self._filled, f"{self._filled} rows of {rows}"
        buffers = self._buffers or self._empty(0)
        values = {
            name: self._given(name, buffer[self._filled - rows : self._filled]) for name, buffer in buffers.items()
        }
        self._let_go()
        self._next = stop
        return Captured(range(first, stop), sequence[first:stop], values)

    def _given(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """A buffer's rows in the dtype asked for; copied where they would keep a far larger buffer from being freed."""
        dtype = DTYPES.get(self._capture.dtype, rows.dtype)
        if dtype == rows.dtype:
            return rows.clone() if 2 * rows.nbytes < rows.untyped_storage().nbytes() else rows
        given = rows.to(dtype)
        if dtype == torch.float16 and bool((given.isinf() & ~rows.isinf()).any()):
            raise CaptureError(f"{name} has values beyond float16's 65504; ask for bfloat16 or float32")
        return given

    def _let_go(self) -> None:
        self._buffers = {}
        self._filled = self.bytes = 0

    def _make_room(self, rows: int) -> None:
        """Have buffers for so many rows."""
        room = len(next(iter(self._buffers.values()))) if self._buffers else 0
        if rows <= room:
            return
        # A window of decoded rows may come when a piece is all but full.
        usual = (self.reserve or (self.piece_bytes or PIECE_BYTES) * 3 // 2) // self.token_bytes
        larger = self._empty(max(rows, min(usual, self._stop - self._next), 2 * room))
        for name, buffer in self._buffers.items():
            larger[name][: self._filled] = buffer[: self._filled]
        self._buffers = larger

    def _empty(self, rows: int) -> dict[str, torch.Tensor]:
        """Buffers for so many rows."""
        empty = {}
        for point in self.points:
            shape = torch.empty(*point.shape, device="meta")[..., self._features].shape
            empty[point.name] = torch.empty(rows, *shape, dtype=point.place.dtype)
        return empty

    @property
    def _features(self) -> slice | list[int]:
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
    return min(2 * capture.tail + SPARE, tokens) * bytes_of_token(capture, points) if capture.tail else 0


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
            window = slice(recording.since, self._step)
            recording.since = self._step
            try:
                for place in places_of([recording]):
                    recording.write(place, self._ring[place][window, slot])
                recording.keep(window.stop - window.start)
            except (RuntimeError, MemoryError) as error:
                recording.give_up(str(error))
