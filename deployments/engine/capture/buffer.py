"""The rows that one request records, until they are taken."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from deployments.engine.capture.row_sizes import DTYPES, SPARE_ROWS, RowSizes
from deployments.engine.request import Captured
from deployments.model.device_memory import is_broken
from deployments.places.hook_site import HookSite, Point
from deployments.points.capture import Capture
from deployments.points.patterns import Patterns, keys
from deployments.points.token_choices import resolve

PIECE_BYTES = 16 << 20  # the most bytes at which a buffer releases its rows; fewer if its share of the budget is small


class CaptureError(ValueError):
    """Recorded rows cannot be returned as requested; the message gives the reason."""


class CaptureBuffer:
    """The recorded rows of one request.

    Points of the same shape and dtype share one host tensor, in which each has consecutive rows. Attention patterns are
    kept row by row, because each row is wider than the last. A buffer's rows change on the worker's thread; the
    engine's thread sets `rows`, `since`, `chunk_bytes`, `leaving` and, as the worker's does, `failed`.

    Attributes:
        names: The names of its points.
        alike: Equal for buffers that take the same part of each row.
        kinds: The points that do not grow by their dtype, their place's shape, and their own.
        rows: The number of tokens processed, recorded or not.
        since: The ring's first step whose rows are in no closed segment yet.
        bytes: Host memory of its rows, in the requested dtype if that is larger.
        leaving: Whether a job is to `flush` it.
        failed: Why it records no more.
        chunk_bytes: The size at which `flush` returns rows; None to keep all rows until the end.
        grows: Whether its points include attention patterns.
        reserve: The most bytes it keeps until the end, if it records only the last rows; else 0.
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
        self.alike: Hashable = (self.names, repr(capture.heads), repr(capture.features))
        self.rows = 0
        self.since = 0
        self.bytes = 0
        self.leaving = False
        self.failed: str | None = None
        self.chunk_bytes: int | None = None
        self.grows = any(point.place.grows for point in points)
        self._sizes = RowSizes.bytes(capture, points)
        self._tokens = resolve(capture.tokens, prompt_tokens, "capture.tokens")
        self.reserve = self._sizes.until_end(self._tokens, prompt_tokens + max_tokens)
        self._capture = capture
        self._prompt = prompt_tokens
        self._stop = prompt_tokens + (max_tokens if self.wants_generated else 0)  # no later token is recorded
        self._next = 0  # the first token not returned yet, recorded or not
        self._filled_to = 0  # the position after the last token from `fill`
        self.kinds: dict[tuple[torch.dtype, tuple[int, ...], tuple[int, ...]], list[Point]] = {}
        self._at: dict[HookSite, list[Point]] = {}
        for point in points:
            self._at.setdefault(point.place, []).append(point)
            if not point.place.grows:
                self.kinds.setdefault((point.place.dtype, point.place.shape, point.shape), []).append(point)
        self._stacks: list[torch.Tensor] = []  # of each kind [points, capacity, ...features]
        self._filled = 0  # rows in each stack
        # Point name -> its pattern rows: [heads * (k + 1)] of the token at position k.
        self._patterns: dict[str, list[torch.Tensor]] = {point.name: [] for point in points if point.place.grows}
        self._new: dict[str, list[torch.Tensor]] = {}  # written, and not counted by `fill` yet

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
    def full(self) -> bool:
        """Whether `flush` returns its rows."""
        if self._tokens.tail or self.chunk_bytes is None:
            return False
        return 0 < self.bytes >= self.chunk_bytes

    def at(self, place: HookSite) -> Sequence[Point]:
        """Its points at a place."""
        return self._at.get(place, ())

    def chosen(self, rows: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """The requested heads and features of a point's rows `[..., *shape]`."""
        heads, features = self._capture.heads, self._capture.features
        if heads is not None and len(shape) > 1:
            rows = rows[..., heads, :]
        return rows if features is None else rows[..., features.index or slice(features.first)]

    def write(self, place: HookSite, value: torch.Tensor, first: int) -> None:
        """Copy `[tokens, heads, keys]` attention patterns of consecutive wanted tokens; `fill` makes them count."""
        if self.failed:
            return
        with self.giving_up():
            for point in self.at(place):
                rows = enumerate(self.chosen(value, (point.shape[0], 0)), first + 1)
                own = [row[:, :seen].clone(memory_format=torch.contiguous_format).view(-1) for seen, row in rows]
                self._new[point.name] = own

    def fill(self, first: int, tokens: int, parts: Sequence[torch.Tensor]) -> None:
        """Add the wanted rows of consecutive tokens, which follow those before, with their patterns from `write`.

        Args:
            first: The first token's position.
            tokens: The number of tokens, wanted or not.
            parts: For each of its kinds, `[points, rows, ...]` of the requested heads and features.
        """
        self._filled_to = first + tokens
        if self.failed or not (wanted := self.wanted(first, tokens)):
            return
        tail, stop = self._tokens.tail, self._filled + len(wanted)
        self._make_room(stop)
        for stack, rows in zip(self._stacks, parts, strict=True):
            stack[:, self._filled : stop] = rows
        self._filled = stop
        if tail and stop > tail + SPARE_ROWS:
            for stack in self._stacks:
                stack[:, :tail] = stack[:, stop - tail : stop].clone()
            self._filled = tail
        for name, new in self._new.items():
            self._patterns[name] += new
            if tail:
                del self._patterns[name][:-tail]
        self._new = {}
        end = wanted[-1] + 1
        seen = keys(range(end - min(self._filled, tail or self._filled), end))
        self.bytes = self._sizes.fixed * self._filled + self._sizes.each_key * seen

    def require(self, came: Collection[HookSite]) -> None:
        """Stop recording if a forward pass did not reach a place that is read."""
        if missed := sorted({point.module for point in self.points if point.place not in came}):
            self.give_up(f"a forward pass did not run {', '.join(missed)}")

    def size(self, start: int, count: int) -> int:
        """Bytes of the rows of `count` tokens from position `start` on."""
        first = max(start, self.rows)
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

    def flush(self, token_ids: Sequence[int]) -> Captured | None:
        """Return the rows gathered so far; None if they are too few, or if only the last ones are wanted.

        Raises:
            CaptureError: float16 was requested, and a value exceeds its range.
        """
        if not self.full:
            return None
        return self._hand_out(self._tokens.within(self._next, self._filled_to), self._filled_to, token_ids)

    def finish(self, token_ids: Sequence[int]) -> Captured:
        """The remaining rows of a request that has ended.

        Raises:
            CaptureError: float16 was requested, and a value exceeds its range; there was no memory for the rows; or a
                forward pass did not reach every place.
        """
        if self.failed:
            raise CaptureError(self.failed)
        stop = len(token_ids) if self.wants_generated else self._prompt
        positions = self._tokens.of(stop) if self._tokens.tail else self._tokens.within(self._next, stop)
        return self._hand_out(positions, stop, token_ids)

    def give_up(self, reason: str) -> None:
        """Record no more rows; `finish` raises with this reason."""
        self.failed = reason
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

    def empty(self, rows: int, device: torch.device | None = None) -> list[torch.Tensor]:
        """Memory for the requested heads and features of so many rows: of each kind `[points, rows, ...]`."""
        shapes = [self.chosen(torch.empty(shape, device="meta"), shape).shape for _, _, shape in self.kinds]
        return [
            torch.empty(len(points), rows, *shape, dtype=dtype, device=device)
            for ((dtype, _, _), points), shape in zip(self.kinds.items(), shapes, strict=True)
        ]

    def _hand_out(self, positions: Sequence[int], stop: int, token_ids: Sequence[int]) -> Captured:
        rows = len(positions)
        assert rows <= self._filled if self._tokens.tail else rows == self._filled, f"{self._filled} rows of {rows}"
        values = dict[str, torch.Tensor | Patterns]()
        for points, stack in zip(self.kinds.values(), self._stacks or self.empty(0), strict=True):
            names = [point.name for point in points]
            values.update(zip(names, self._given(names, stack[:, self._filled - rows : self._filled]), strict=True))
        for point in self.points:
            if point.place.grows:
                last = self._patterns[point.name][-rows:] if rows else [torch.empty(0, dtype=point.place.dtype)]
                (own,) = self._given([point.name], torch.cat(last)[None])
                consecutive = range(positions[0], positions[-1] + 1) if positions else range(stop, stop)
                assert len(consecutive) == rows, "patterns are recorded of consecutive tokens"
                heads = len(self._capture.heads) if self._capture.heads else point.shape[0]
                values[point.name] = Patterns(own, heads, consecutive)
        self._let_go()
        seen, self._next = token_ids[self._next : stop], stop
        tokens = [token_ids[position] for position in positions]
        return Captured(positions, tokens, {name: values[name] for name in self.names}, seen)

    def _given(self, names: Sequence[str], rows: torch.Tensor) -> Sequence[torch.Tensor]:
        """Rows of points [points, rows, ...] in the requested dtype, integers in their own.

        They are copied if a view would keep far more memory.
        """
        dtype = DTYPES.get(self._capture.dtype, rows.dtype) if rows.is_floating_point() else rows.dtype
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
        self._patterns = {name: [] for name in self._patterns}
        self._new = {}
        self._filled = self.bytes = 0

    def _make_room(self, rows: int) -> None:
        """Ensure that the stacks have space for this many rows."""
        room = self._stacks[0].shape[1] if self._stacks else 0
        if rows <= room or not self.kinds:  # readouts may be recorded without a point
            return
        # A window of decoded rows may arrive when a chunk is nearly full.
        token_bytes = self._sizes.of(range(self.rows, self.rows + 1))
        usual = (self.reserve or (self.chunk_bytes or PIECE_BYTES) * 3 // 2) // token_bytes
        most = len(self._tokens.within(self._next, self._stop))
        larger = self.empty(max(rows, min(usual, most), 2 * room))
        for stack, new in zip(self._stacks, larger, strict=bool(self._stacks)):
            new[:, : self._filled] = stack[:, : self._filled]
        self._stacks = larger


_TOKENS = attrgetter("token_ids"), attrgetter("positions"), attrgetter("seen")


def joined(parts: Sequence[Captured]) -> Captured:
    """Join consecutive parts of a recording."""
    if len(parts) == 1:
        return parts[0]
    values = dict[str, torch.Tensor | Patterns]()
    for name in parts[0].values:
        own: list[Any] = [part.values[name] for part in parts]
        values[name] = Patterns.joined(own) if isinstance(own[0], Patterns) else torch.cat(own)
    token_ids, positions, seen = ([one for part in parts for one in of(part)] for of in _TOKENS)
    consecutive = range(positions[0], positions[-1] + 1) if positions else range(0)
    return Captured(consecutive if len(consecutive) == len(positions) else positions, token_ids, values, seen)
