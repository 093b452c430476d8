"""The engine: admit -> forward -> sample -> emit, for all requests at once.

One thread owns the model and calls `step` (or `run`, which does nothing else); any thread may `submit`,
`cancel` and say what was `written`. Requests under way hold KV slots. Each step is one forward: a prefill of
new requests, the next piece of a long prompt, or one token for all requests whose prompts are in.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from deployments.activations.points import Place
from deployments.engine import memory
from deployments.engine.batch import Batch
from deployments.engine.memory import KvMemory, held_bytes
from deployments.engine.model import Model
from deployments.engine.outflow import Outflow
from deployments.engine.recorder import CaptureError, Recorder, Recording, joined, places_of
from deployments.engine.request import Captured, Delta, Event, Finished, FinishReason, Request, Rows
from deployments.engine.row import Row
from deployments.engine.sampling import draw
from deployments.engine.schedule import Prefill, Schedule
from deployments.engine.text import TextStream
from deployments.errors import RequestError

logger = logging.getLogger(__name__)


@dataclass
class Statistics:
    """What the engine is doing.

    Attributes:
        running: Requests that hold a slot.
        waiting: Requests that wait for one.
        slots: Slots there is KV memory for now.
        kv_bytes: KV memory held.
        kv_budget_bytes: The most KV memory that will be held.
        capture_bytes: Recorded rows in host memory: gathered, or handed out and not written yet.
        steps: Forwards so far.
        step_seconds: How long one takes, a mean of the latest.
        tokens: Tokens generated so far.
        tokens_per_second: The rate of the latest steps.
        preempted: Requests that lost their slot and were run again.
        out_of_memory: Forwards that found no memory.
    """

    running: int = 0
    waiting: int = 0
    slots: int = 0
    kv_bytes: int = 0
    kv_budget_bytes: int = 0
    capture_bytes: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    tokens: int = 0
    tokens_per_second: float = 0.0
    preempted: int = 0
    out_of_memory: int = 0


class _Written(NamedTuple):
    id: str
    bytes: int


class Engine:
    """Continuous batching over one model."""

    def __init__(
        self,
        model: Model,
        *,
        max_running: int = 64,
        prefill_tokens: int = 2048,
        kv_bytes: int | None = None,
        kv_fraction: float | None = None,
        capture_bytes: int | None = None,
    ) -> None:
        """Take a model into service.

        Args:
            model: The only copy of the weights.
            max_running: The most requests that share a decode.
            prefill_tokens: The most tokens, padding included, of one prefill; a longer prompt goes in pieces.
            kv_bytes: The most KV memory; without it, `kv_fraction` of what is free now.
            kv_fraction: A part of the free memory; half unless given.
            capture_bytes: Host memory for recorded rows. Rows are then handed out in pieces as `Rows`, and
                whoever takes them calls `written`; None leaves them with their request until its end.
        """
        self.model = model
        self.statistics = Statistics()
        self.step_began: float | None = None  # monotonic seconds; None between steps
        self._memory = KvMemory(model, max_running, kv_bytes, kv_fraction)
        self._cache = self._memory.cache
        self._recorder = Recorder(model.device)
        self._batch = Batch(self._cache, self._recorder)
        self._schedule = Schedule(self._memory, max_running, prefill_tokens, capture_bytes)
        self._outflow = Outflow(capture_bytes)
        self._inbox: queue.SimpleQueue[Request | str | _Written | None] = queue.SimpleQueue()
        self._arrivals = itertools.count()
        self._prefilled = False
        self._idle = True
        self._stopping = False

    # ---- for any thread

    def check(self, request: Request) -> None:
        """Refuse what could never run.

        Raises:
            RequestError: An empty prompt, or more tokens than the context or the KV memory holds.
        """
        prompt, context = len(request.prompt), self.model.context
        if not prompt:
            raise RequestError("the prompt has no tokens", "prompt")
        if min(request.prompt) < 0 or max(request.prompt) >= self.model.vocabulary:
            raise RequestError(f"token ids go from 0 to {self.model.vocabulary - 1}", "prompt")
        if prompt + min(request.max_tokens, 1) > context:
            message = f"the prompt has {prompt} tokens, this model's context is {context} with the answer"
            raise RequestError(message, "prompt", "context_length_exceeded")
        if prompt + request.max_tokens > context:
            message = f"{prompt} prompt tokens and {request.max_tokens} new ones exceed the context of {context}"
            raise RequestError(message, "max_tokens", "context_length_exceeded")
        most = prompt + request.max_tokens + 1
        if not self._memory.fits(1, most):
            needed, held = most * self._memory.position_bytes, self._memory.budget * self._memory.position_bytes
            message = f"{most} tokens need {needed} bytes of KV memory or more, the server's budget is {held}"
            raise RequestError(message, "max_tokens", "kv_memory_exceeded")

    def submit(self, request: Request) -> None:
        """Queue a request that `check` let pass; its events come from `step`."""
        self._inbox.put(request)

    def cancel(self, request_id: str) -> None:
        """End a request where it stands; its last event says "cancelled". Unknown ids do nothing."""
        self._inbox.put(request_id)

    def written(self, request_id: str, size: int) -> None:
        """Say that `size` bytes of the rows that a request handed out need no memory any more."""
        self._inbox.put(_Written(request_id, size))

    def stop(self) -> None:
        """Make `run` return after its step."""
        self._stopping = True
        self._inbox.put(None)

    # ---- for the thread that owns the model

    def run(self, emit: Callable[[list[Event]], None]) -> None:
        """Step until stopped, handing on each step's events; wait where there is nothing to do."""
        while not self._stopping:
            events = self.step(wait=True)
            if events:
                emit(events)

    def generate(self, requests: Iterable[Request]) -> list[Finished]:
        """Run requests together to their end and give their last events, in order, with all they recorded.

        Raises:
            RequestError: One of them could never run, or two have the same id.
        """
        requests = list(requests)
        if len({request.id for request in requests}) < len(requests):
            raise RequestError("two requests have the same id", "id")
        for request in requests:
            self.check(request)
        for request in requests:
            self.submit(request)
        pieces: dict[str, list[Captured]] = {request.id: [] for request in requests}
        done: dict[str, Finished] = {}
        while len(done) < len(requests):
            for event in self.step(wait=True):
                if isinstance(event, Finished):
                    done[event.id] = event
                    if event.captured is not None and pieces[event.id]:
                        done[event.id] = replace(event, captured=joined([*pieces[event.id], event.captured]))
                elif isinstance(event, Rows):
                    pieces[event.id].append(event.captured)
                    self.written(event.id, event.captured.bytes)
        return [done[request.id] for request in requests]

    @torch.inference_mode()
    def step(self, wait: bool = False) -> list[Event]:
        """One round: take in what was sent, run one forward, and say what it brought.

        Args:
            wait: Where there is nothing to do, wait until something is sent.
        """
        events: list[Event] = []
        if wait and self._idle:
            self._receive(self._inbox.get(), events)
        began = self.step_began = time.monotonic()
        while not self._inbox.empty():
            self._receive(self._inbox.get(), events)
        tokens = self.statistics.tokens
        # A prefill is followed by a decode, so that running requests do not stand still behind new ones.
        prefill = None if self._prefilled and self._batch.decoding else self._next_prefill()
        self._prefilled = prefill is not None
        self._idle = prefill is None and not self._batch.decoding
        if prefill:
            self._guarded(lambda: self._prefill(prefill, events), prefill.rows, events)
        elif self._batch.decoding:
            self._guarded(lambda: self._decode(events), list(self._batch.decoding), events)
        self._count(time.monotonic() - began, self.statistics.tokens - tokens)
        self.step_began = None
        return events

    def _receive(self, message: Request | str | _Written | None, events: list[Event]) -> None:
        if isinstance(message, Request):
            capture = message.capture
            recording = Recording(capture, message.points, len(message.prompt)) if capture else None
            text = TextStream(self.model.tokenizer, message.stop)
            numbers = random.Random(message.sampling.seed)
            self._schedule.waiting.append(Row(message, text, numbers, recording, next(self._arrivals)))
        elif isinstance(message, str):
            self._cancel(message, events)
        elif isinstance(message, _Written):
            self._outflow.written(message.id, message.bytes)
            self._settle()

    def _cancel(self, request_id: str, events: list[Event]) -> None:
        for row in (*self._schedule.waiting, *self._batch.rows):
            if row.request.id == request_id:
                return self._finish(row, "cancelled", events)
        return None

    # ---- room

    def _next_prefill(self) -> Prefill | None:
        return self._schedule.next_prefill(self._batch, self._outflow.full)

    def _make_room(self) -> None:
        """Grow for the longest row's next token; while that exceeds the budget, the youngest row waits again."""
        batch = self._batch
        while (longest := max(row.fed for row in batch.decoding) + 1) > self._cache.window.capacity:
            if len(batch) == 1 or self._memory.fits(len(batch), longest):
                return self._memory.reserve(len(batch), longest, keep=True)
            self._preempt(max(batch.rows, key=lambda row: row.arrival))
            if not batch.decoding:
                return None
        return None

    def _preempt(self, row: Row) -> None:
        """Take a row's slot; its tokens and what it recorded stay, and it is run again from its beginning."""
        self._batch.remove(row)
        row.stalled = False
        self._schedule.put_back([row])
        self.statistics.preempted += 1

    # ---- forwards

    def _prefill(self, prefill: Prefill, events: list[Event]) -> None:
        rows, start, counts = prefill
        batch, device = self._batch, self.model.device
        first = batch.rows.index(rows[0]) if start else len(batch)
        longest = max(counts)
        for row in rows:
            row.memory.before = row.memory.before or held_bytes(device)
        new = [row for row in rows if row not in batch]
        need = max(row.need for row in (*rows, *batch.rows))
        self._memory.reserve(len(batch) + len(new), need, keep=len(batch) > 0)
        for row in rows:
            row.written = max(row.written, start + longest)
        pieces = [row.sequence[start : start + count] for row, count in zip(rows, counts, strict=True)]
        padded = [piece + [0] * (longest - len(piece)) for piece in pieces]
        ids = torch.tensor(padded, device=device)  # [rows, longest]
        lengths = torch.tensor(counts, device=device)
        recordings = [(i, row.recording) for i, row in enumerate(rows) if row.recording and row.records_prefill]
        places = places_of(recording for _, recording in recordings)
        copies = []

        def take(place: Place, value: torch.Tensor) -> None:
            for i, recording in recordings:
                fresh = value[i, max(0, recording.rows - start) : counts[i]]  # the rest was recorded before
                copies.append((recording, recording.copy(place, fresh)))

        self._cache.prefill(first, start)
        every = any(place.module == self.model.head for place in places)
        logits = self.model.prefill(ids, lengths, self._cache, places, take, every_logit=every, start=start)
        for recording, copy in copies:
            recording.add(copy)
        for row in new:
            batch.add(row)
        for row, count in zip(rows, counts, strict=True):
            row.fed = start + count
            if row.recording:
                row.recording.rows = max(row.recording.rows, row.fed)
        whole = [i for i, row in enumerate(rows) if row.fed == row.length]
        self._advance([rows[i] for i in whole], logits[whole], events)
        self._went_well(rows, events)

    def _decode(self, events: list[Event]) -> None:
        self._make_room()
        rows = list(self._batch.decoding)
        if not rows:
            return
        device = self.model.device
        slots = torch.arange(len(rows), device=device)
        positions = torch.tensor([row.fed for row in rows], device=device)
        ids = torch.tensor([row.tokens[-1] for row in rows], device=device)
        longest = max(row.fed for row in rows) + 1
        self._cache.decode(slots, positions, longest)
        places = self._recorder.places()
        if places:
            self._recorder.begin(places, self._cache.window.slots)
        logits = self.model.decode(ids, positions, longest, self._cache, places, self._recorder.take)
        if places:
            self._recorder.end()
        for row in rows:
            row.fed += 1
            row.written = max(row.written, row.fed)
        self._advance(rows, logits, events)
        self._went_well(rows, events)

    def _went_well(self, rows: Sequence[Row], events: list[Event]) -> None:
        """After a forward: note the memory it took, hand out recorded rows, let rows decode or stand still."""
        held = held_bytes(self.model.device)
        for row in rows:
            row.memory.peak = max(row.memory.peak, held)
        self._schedule.went_well()
        self._send_rows(events)
        self._settle()

    def _send_rows(self, events: list[Event]) -> None:
        recording = [row for row in self._batch.rows if row.recording]
        piece = self._outflow.piece(len(recording))
        if piece is None:
            return
        for row in recording:
            assert row.recording is not None
            if row.recording.bytes < piece:
                continue
            try:
                captured = row.recording.flush(row.sequence)
            except CaptureError as error:
                row.recording.give_up(str(error))
            else:
                if captured is not None:
                    self._outflow.sent(row, captured.bytes)
                    events.append(Rows(row.request.id, captured))

    def _settle(self) -> None:
        """Let rows stand still that hold too many recorded bytes, and put each row where it belongs."""
        rows = list(self._batch.rows)
        recording = sum(row.recording is not None for row in rows)
        for row in rows:
            row.stalled = self._outflow.stalls(row, recording)
            self._batch.settle(row)

    # ---- what goes wrong

    def _guarded(self, forward: Callable[[], None], rows: Sequence[Row], events: list[Event]) -> None:
        """Run a forward; an error ends its rows, a lack of memory as few as can be, and the engine goes on."""
        try:
            return forward()
        except AssertionError:
            raise  # the engine's own invariant is broken: it must not go on
        except Exception as error:
            logger.exception("a forward of %d requests failed", len(rows))
            ended = {event.id for event in events if isinstance(event, Finished)}
            left = [row for row in rows if row.request.id not in ended and row not in self._schedule.waiting]
            if not memory.is_out_of_memory(error):
                return self._fail(left, f"{type(error).__name__}: {error}", "engine_error", events)
            said = memory.describe(self.model.device, error)
        # Outside of the handler, whose error holds on to the forward's tensors.
        self.statistics.out_of_memory += 1
        memory.release_cached(self.model.device)
        return self._relieve(left, said, events)

    def _relieve(self, rows: list[Row], said: str, events: list[Event]) -> None:
        """Ask less of the next forwards than of one that found no memory; end a row that cannot ask less."""
        batch, schedule = self._batch, self._schedule
        new = [row for row in rows if row not in batch]
        decoding = bool(rows) and not new and rows[0].decodes
        if decoding:
            youngest = sorted(batch.rows, key=lambda row: row.arrival)[(len(batch) + 1) // 2 :]
            for row in reversed(youngest):
                self._preempt(row)
            schedule.limit_rows(len(batch))
            hopeless = [] if youngest else rows
        else:
            tokens = sum(min(row.length - row.fed, schedule.tokens) for row in rows)
            for i, row in enumerate(new):
                if row.written:  # some layers were
                    self._cache.clear(len(batch) + i, row.written)
                    row.written = 0
            schedule.put_back(new)
            smaller = schedule.halve_tokens(tokens)
            others = [row for row in batch.rows if row not in rows]
            if not smaller and others:  # they have the memory: it waits for them
                schedule.limit_rows(len(others))
                for row in rows:
                    if row in batch:
                        self._preempt(row)
            hopeless = [] if smaller or others else rows
        if len(batch):
            self._memory.trim(len(batch), max(row.written for row in batch.rows) + 1)
        for row in hopeless:
            size = row.need * self._memory.position_bytes
            prompt, new_tokens = len(row.request.prompt), len(row.tokens)
            message = (
                f"out of memory: {said}; this request has {prompt} prompt and {new_tokens} generated tokens of up to "
                f"{row.request.max_tokens}, {memory.mib(size)} of keys and values: ask for less, or capture less"
            )
            self._fail([row], message, "out_of_memory", events)

    def _fail(self, rows: Sequence[Row], message: str, code: str, events: list[Event]) -> None:
        for row in rows:
            self._finish(row, "error", events, message, code)

    # ---- what a forward brought

    def _advance(self, rows: list[Row], logits: torch.Tensor, events: list[Event]) -> None:
        """Draw each row's next token from logits [rows, vocabulary], and end what has come to its end."""
        if not rows:
            return
        top, ids = logits.max(dim=-1)  # NaN wins a maximum
        drawing = [i for i, row in enumerate(rows) if row.request.sampling.temperature > 0 and not row.ending]
        if drawing:
            drawn = draw(
                logits[drawing],
                [rows[i].request.sampling for i in drawing],
                [rows[i].random.random() for i in drawing],
            )
            ids[drawing] = drawn
        for row, token, finite in zip(rows, ids.tolist(), top.isfinite().tolist(), strict=True):
            if not finite:
                self._finish(row, "error", events, "the model gave a value that is not finite for this request")
            elif row.ending:
                self._finish(row, row.ending, events)
            else:
                self._accept(row, token, events)

    def _accept(self, row: Row, token: int, events: list[Event]) -> None:
        request = row.request
        if request.max_tokens == 0:
            return self._finish(row, "length", events)
        row.tokens.append(token)
        self.statistics.tokens += 1
        ended = token in self.model.eos and not request.ignore_eos
        text = row.text.add(token)
        if ended or row.text.stopped:
            row.ending = "stop"
        elif len(row.tokens) == request.max_tokens:
            row.ending = "length"
        if row.ending:
            text += row.text.close(row.tokens)
        events.append(Delta(request.id, (token,), text))
        if row.ending and not (row.recording and row.recording.wants_generated):
            return self._finish(row, row.ending, events)
        return None

    def _finish(
        self,
        row: Row,
        reason: FinishReason,
        events: list[Event],
        error: str | None = None,
        code: str = "engine_error",
    ) -> None:
        if row in self._batch:
            self._batch.remove(row)
        else:
            with contextlib.suppress(ValueError):  # it is on its way from the queue to a slot
                self._schedule.waiting.remove(row)
        captured = None
        if row.recording and reason in ("stop", "length"):
            try:
                captured = row.recording.finish(row.sequence)
                self._outflow.sent(row, captured.bytes)
            except (CaptureError, RuntimeError) as failed:  # torch's: no memory to join what was recorded
                error = str(failed)
        row.memory.after = held_bytes(self.model.device)
        request = row.request
        events.append(Finished(request.id, reason, request.prompt, row.tokens, captured, error, code, row.memory))

    def _count(self, seconds: float, tokens: int) -> None:
        numbers, window = self.statistics, self._cache.window
        numbers.running = len(self._batch)
        numbers.waiting = len(self._schedule.waiting)
        numbers.slots = window.slots
        numbers.kv_bytes = self._cache.bytes
        numbers.kv_budget_bytes = self._memory.budget * self._memory.position_bytes
        gathered = sum(row.recording.bytes for row in self._batch.rows if row.recording)
        numbers.capture_bytes = gathered + self._outflow.bytes
        numbers.steps += not self._idle
        if not self._idle:
            numbers.step_seconds += (seconds - numbers.step_seconds) / min(numbers.steps, 16)
            rate = tokens / seconds if seconds else 0.0
            numbers.tokens_per_second += (rate - numbers.tokens_per_second) / min(numbers.steps, 16)
