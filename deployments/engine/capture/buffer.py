"""The rows that one request records, until they are taken."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from deployments.engine.capture.row_sizes import DTYPES, SPARE_ROWS, RowSizes
from deployments.engine.request import Captured
from deployments.model.device_memory import is_broken
from deployments.places.hook_site import HookSite, Point
from deployments.points.capture import Capture
from deployments.points.patterns import Patterns
from deployments.points.token_choices import resolve

PIECE_BYTES = 16 << 20  # the most bytes at which a buffer releases its rows; fewer if its share of the budget is small


class CaptureError(ValueError):
    """Recorded rows cannot be returned as requested; the message gives the reason."""


class PatternRows:
    """Attention patterns of one point on the host, one tensor for each row.

    Attributes:
        bytes: Memory of the counted rows.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._rows: list[torch.Tensor] = []  # [heads * (k + 1)] of the token at position k
        self._new: list[torch.Tensor] = []  # written and not counted yet

    def write(self, first: int, value: torch.Tensor) -> None:
        """Copy rows [rows, heads, keys] from position `first` on; each row is zero after its own token."""
        own = [value[i, :, : first + i + 1] for i in range(len(value))]
        self._new = [row.clone(memory_format=torch.contiguous_format).view(-1) for row in own]

    def keep(self, tail: int | None) -> None:
        """Count the rows written last; keep only the last `tail` rows of all, unless `tail` is None."""
        self._rows += self._new
        dropped = self._rows[:-tail] if tail else []
        self.bytes += sum(row.nbytes for row in self._new) - sum(row.nbytes for row in dropped)
        del self._rows[: len(dropped)]
        self._new = []

    def last(self, rows: int, dtype: torch.dtype) -> torch.Tensor:
        """The values of the last rows, concatenated."""
        return torch.cat(self._rows[-rows:]) if rows else torch.empty(0, dtype=dtype)


class CaptureBuffer:
    """The recorded rows of one request.

    Points of the same shape and dtype share one host tensor, in which each has consecutive rows. Attention patterns are
    kept row by row, because each row is wider than the last.

    Attributes:
        points: The recorded points.
        names: Their names.
        rows: The number of tokens processed, recorded or not.
        since: The ring's first step whose rows this buffer does not have yet.
        bytes: Host memory of its rows.
        chunk_bytes: The size at which `flush` returns rows; None to keep all rows until the end.
        grows: Whether its points include attention patterns.
        reserve: The most bytes it keeps until the end, if it records only the last rows or a few; else 0.
    """

    def __init__(self, capture: Capture, points: Sequence[Point], prompt_tokens: int, max_tokens: int) -> None:
        """Initialize an empty buffer.

        Args:
            capture: The request's capture field.
            points: Its points.
            prompt_tokens: Length of the prompt.
            max_tokens: The most new tokens.
        """
        self.points = points
        self.names = tuple(point.name for point in points)
        self.rows = 0
        self.since = 0
        self.bytes = 0
        self.chunk_bytes: int | None = None
        self.grows = any(point.place.grows for point in points)
        self._sizes = RowSizes.bytes(capture, points)
        self._tokens = resolve(capture.tokens, prompt_tokens, "capture.tokens")
        self.reserve = self._sizes.until_end(self._tokens, prompt_tokens + max_tokens)
        self._failed: str | None = None
        self._capture = capture
        self._prompt = prompt_tokens
        self._stop = prompt_tokens + (max_tokens if self.wants_generated else 0)  # no later token is recorded
        self._next = 0  # the first token not returned yet, recorded or not
        self._kinds: dict[tuple[torch.dtype, tuple[int, ...]], list[str]] = {}  # dtype, shape of a row -> points
        for point in points:
            if not point.place.grows:
                self._kinds.setdefault((point.place.dtype, self._recorded_shape(point)), []).append(point.name)
        self._stacks: list[torch.Tensor] = []  # of each kind [points, capacity, ...features]
        self._buffers: dict[str, torch.Tensor] = {}  # their views: point name -> [capacity, ...features]
        self._filled = 0  # rows in each buffer
        self._patterns = {point.name: PatternRows() for point in points if point.place.grows}
        self._at: dict[HookSite, list[Point]] = {}
        for point in points:
            self._at.setdefault(point.place, []).append(point)

    @property
    def wants_prompt(self) -> bool:
        """Whether prompt tokens are recorded."""
        return bool(self._tokens.within(0, self._prompt))

    @property
    def wants_generated(self) -> bool:
        """Whether generated tokens are recorded; the last one then runs through the model, too."""
        tokens, generates = self._tokens, self._capture.mode == "generate"
        return generates and (tokens.stop is None or tokens.stop > self._prompt)

    @property
    def next_wanted(self) -> int:
        """The first position that is still to be recorded, or may be."""
        if not self.wants_prompt and not self.wants_generated:
            return self._stop
        first = max(self.rows, self._tokens.first)
        return max(first, self._prompt - self._tokens.tail) if self._tokens.tail else first

    @property
    def gathers(self) -> bool:
        """Whether `fill` takes its rows: whole rows of points that do not grow."""
        return bool(self.points) and not self.grows and self._capture.heads is None and self._capture.features is None

    @property
    def failed(self) -> bool:
        """Whether it records no more."""
        return self._failed is not None

    def reads(self, place: HookSite) -> bool:
        """Whether one of its points is at this place."""
        return place in self._at

    def write(self, place: HookSite, value: torch.Tensor, first: int) -> None:
        """Copy the requested rows of a place; `keep` makes them count.

        Args:
            place: The place.
            value: Rows of consecutive tokens, `[tokens, ...]`.
            first: The first token's position.
        """
        if self._failed or place not in self._at or not (wanted := self.wanted(first, len(value))):
            return
        if isinstance(wanted, range):
            value = value[wanted.start - first : wanted.stop - first]
        else:
            value = value[[position - first for position in wanted]]
        if place.grows:
            for point in self._at[place]:
                self._patterns[point.name].write(wanted[0], self._heads_of(value.cpu()))
            return
        stop = self._filled + len(value)
        self._make_room(stop)
        for point in self._at[place]:
            rows = value.reshape(len(value), *point.shape)
            rows = self._heads_of(rows) if len(point.shape) > 1 else rows
            self._buffers[point.name][self._filled : stop] = rows[..., self._features]

    def fill(self, gathered: Sequence[torch.Tensor], rows: slice) -> None:
        """Copy requested rows of all points at once; `keep` makes them count.

        Args:
            gathered: As `stacked` returns.
            rows: The rows of this buffer there.
        """
        stop = self._filled + rows.stop - rows.start
        self._make_room(stop)
        for stack, values in zip(self._stacks, gathered, strict=True):
            stack[:, self._filled : stop] = values[:, rows]

    def stacked(self, values: Mapping[HookSite, torch.Tensor]) -> list[torch.Tensor]:
        """Rows of its places, also those of other buffers with the same points, as `fill` takes them.

        Args:
            values: For each place, [rows, ...] on its device.

        Returns:
            For each dtype and shape [points, rows, ...features] on the CPU.
        """
        of = {point.name: point for point in self.points}
        device = next(iter(values.values())).device
        return [
            torch.stack([values[of[name].place].to(device).view(-1, *shape) for name in names]).cpu()
            for (_, shape), names in self._kinds.items()
        ]

    def keep(self, first: int, rows: int) -> None:
        """Count rows that `write` has copied for every place, or `fill` at once; they follow those counted before."""
        if self._failed or not (wanted := self.wanted(first, rows)):
            return
        tail = self._tokens.tail
        self._filled += len(wanted)
        if tail and self._filled > tail + SPARE_ROWS:
            for stack in self._stacks:
                stack[:, :tail] = stack[:, self._filled - tail : self._filled].clone()
            self._filled = tail
        for patterns in self._patterns.values():
            patterns.keep(tail)
        held = self._filled * sum(stack[:, :1].nbytes for stack in self._stacks)
        self.bytes = held + sum(patterns.bytes for patterns in self._patterns.values())

    def comes_with(self, came: Container[HookSite]) -> bool:
        """Whether a forward pass reached all places that are read."""
        return all(place in came for place in self._at)

    def require(self, came: Collection[HookSite]) -> None:
        """Stop recording if a forward pass did not reach a place that is read."""
        if missed := sorted({point.module for point in self.points if point.place not in came}):
            self.give_up(f"a forward pass did not run {', '.join(missed)}")

    def size(self, start: int, count: int) -> int:
        """Bytes of the rows of `count` tokens from position `start` on."""
        first = max(start, self.rows, self._next)
        return self._sizes.of(self.wanted(first, max(0, min(start + count, self._stop) - first)))

    def bearable(self, start: int, most: int, least: int, room: int) -> int:
        """How many tokens a prefill may have so that their rows fit into memory.

        Args:
            start: The position of the first.
            most: The most tokens wanted.
            least: This many may always run, or fewer if their rows exceed one chunk.
            room: Bytes left for rows.
        """
        size = partial(self.size, start)
        fitting = bisect_right(range(1, most + 1), room, key=size)
        return max(1, fitting, bisect_right(range(1, least + 1), PIECE_BYTES, key=size))

    def flush(self, token_ids: Callable[[], Sequence[int]]) -> Captured | None:
        """Return the rows gathered so far; None if they are too few, or if only the last ones are wanted.

        Args:
            token_ids: Returns the token ids of prompt and answer.

        Raises:
            CaptureError: float16 was requested, and a value exceeds its range.
        """
        if (
            self._tokens.tail
            or self._tokens.apart
            or not self.bytes
            or self.chunk_bytes is None
            or self.bytes < self.chunk_bytes
        ):
            return None
        stop = max(self._next, self._tokens.first) + self._filled
        return self._hand_out(self._tokens.within(self._next, stop), stop, token_ids())

    def finish(self, token_ids: Sequence[int]) -> Captured:
        """The remaining rows of a request that has ended.

        Args:
            token_ids: The token ids of prompt and answer.

        Raises:
            CaptureError: float16 was requested, and a value exceeds its range; there was no memory for the rows; or a
                forward pass did not reach every place.
        """
        if self._failed:
            raise CaptureError(self._failed)
        stop = len(token_ids) if self.wants_generated else self._prompt
        positions = self._tokens.of(stop) if self._tokens.tail else self._tokens.within(self._next, stop)
        return self._hand_out(positions, stop, token_ids)

    def give_up(self, reason: str) -> None:
        """Record no more rows; `finish` raises with this reason."""
        self._failed = reason
        self._let_go()

    @contextmanager
    def giving_up(self) -> Iterator[None]:
        """A context in which an error ends the recording and nothing else, unless it is the device's."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if is_broken(error):
                raise
            self.give_up(str(error))

    def wanted(self, first: int, count: int) -> Sequence[int]:
        """Positions of `count` consecutive tokens from `first` on that are recorded, or may be among the last."""
        positions = self._tokens.within(first, first + count)
        return positions[-self._tokens.tail :] if self._tokens.tail else positions

    def _heads_of(self, rows: torch.Tensor) -> torch.Tensor:
        return rows if self._capture.heads is None else rows[:, self._capture.heads]

    def _hand_out(self, positions: Sequence[int], stop: int, token_ids: Sequence[int]) -> Captured:
        rows = len(positions)
        assert rows <= self._filled if self._tokens.tail else rows == self._filled, f"{self._filled} rows of {rows}"
        given = dict[str, torch.Tensor]()
        for names, stack in zip(self._kinds.values(), self._stacks or self._empty(0), strict=True):
            given.update(zip(names, self._given(names, stack[:, self._filled - rows : self._filled]), strict=True))
        values: dict[str, torch.Tensor | Patterns] = {
            point.name: given[point.name] for point in self.points if not point.place.grows
        }
        for point in self.points:
            if point.place.grows:
                (own,) = self._given([point.name], self._patterns[point.name].last(rows, point.place.dtype)[None])
                consecutive = range(positions[0], positions[-1] + 1) if positions else range(stop, stop)
                assert len(consecutive) == rows, "patterns are recorded of consecutive tokens"
                heads = len(self._capture.heads) if self._capture.heads else point.shape[0]
                values[point.name] = Patterns(own, heads, consecutive)
        self._let_go()
        self._next = stop
        return Captured(positions, [token_ids[position] for position in positions], values)

    def _given(self, names: Sequence[str], rows: torch.Tensor) -> Sequence[torch.Tensor]:
        """Rows of points [points, rows, ...] in the requested dtype; copied if a view would keep far more memory."""
        dtype = DTYPES.get(self._capture.dtype, rows.dtype)
        if dtype == rows.dtype:
            given = rows.clone() if 2 * rows.nbytes < rows.untyped_storage().nbytes() else rows
        else:
            given = rows.to(dtype, memory_format=torch.contiguous_format)
        if dtype == torch.float16 != rows.dtype:
            for name, before, after in zip(names, rows, given, strict=True):
                if bool((after.isinf() & ~before.isinf()).any()):
                    raise CaptureError(f"{name} has values beyond float16's 65504: record bfloat16 or float32")
        return given.unbind()

    def _let_go(self) -> None:
        self._stacks = []
        self._buffers = {}
        self._patterns = {name: PatternRows() for name in self._patterns}
        self._filled = self.bytes = 0

    def _make_room(self, rows: int) -> None:
        """Ensure that the buffers have space for this many rows."""
        room = self._stacks[0].shape[1] if self._stacks else 0
        if rows <= room:
            return
        # A window of decoded rows may arrive when a chunk is nearly full.
        token_bytes = self._sizes.of(range(self.rows, self.rows + 1))
        usual = (self.reserve or (self.chunk_bytes or PIECE_BYTES) * 3 // 2) // token_bytes
        most = len(self._tokens.within(self._next, self._stop))
        larger = self._empty(max(rows, min(usual, most), 2 * room))
        for stack, new in zip(self._stacks, larger, strict=bool(self._stacks)):
            new[:, : self._filled] = stack[:, : self._filled]
        self._stacks = larger
        pairs = zip(self._kinds.values(), larger, strict=True)
        self._buffers = {name: view for names, stack in pairs for name, view in zip(names, stack.unbind(), strict=True)}

    def _empty(self, rows: int) -> list[torch.Tensor]:
        """Stacks for this many rows."""
        return [torch.empty(len(names), rows, *shape, dtype=dtype) for (dtype, shape), names in self._kinds.items()]

    def _recorded_shape(self, point: Point) -> tuple[int, ...]:
        """The shape of one recorded row: the chosen heads and features of the point."""
        if self._capture.heads is None and self._capture.features is None:
            return point.shape
        shape, chosen = list(point.shape), self._features
        if len(shape) > 1 and self._capture.heads is not None:
            shape[0] = len(self._capture.heads)
        shape[-1] = len(chosen) if isinstance(chosen, list) else len(range(shape[-1])[chosen])
        return tuple(shape)

    @property
    def _features(self) -> slice | list[int]:
        features = self._capture.features
        if features is None:
            return slice(None)
        return features.index if features.index else slice(features.first)


def joined(parts: Sequence[Captured]) -> Captured:
    """Join consecutive parts of a recording."""
    if len(parts) == 1:
        return parts[0]
    values = {name: _joined([part.values[name] for part in parts]) for name in parts[0].values}
    token_ids = [token for part in parts for token in part.token_ids]
    positions = [position for part in parts for position in part.positions]  # consecutive; other rows come in one part
    return Captured(range(positions[0], positions[-1] + 1) if positions else range(0), token_ids, values)


def _joined(values: list[Any]) -> Any:
    return Patterns.joined(values) if isinstance(values[0], Patterns) else torch.cat(values)
