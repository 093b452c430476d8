"""The engine: admit -> forward -> sample -> emit, for all requests at once.

One thread owns the model and calls `step` (or `run`, which does nothing else); any thread may `submit` and
`cancel`. Running requests hold KV slots 0..n-1. Each step is one forward: a prefill of new requests, or one
token for all running ones.
"""

from __future__ import annotations

import itertools
import logging
import queue
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from deployments.activations.points import Place
from deployments.engine.memory import Memory
from deployments.engine.model import Model
from deployments.engine.recorder import CaptureError, Recorder, Recording, places_of
from deployments.engine.request import Delta, Event, Finished, FinishReason, Logprob, Request
from deployments.engine.row import Row
from deployments.engine.sampler import Sampler
from deployments.engine.sampling import check_sampling, choose
from deployments.engine.text import TextStream
from deployments.errors import RequestError

logger = logging.getLogger(__name__)


@dataclass
class Statistics:
    """What the engine is doing.

    Attributes:
        running: Requests that hold a slot.
        waiting: Requests that wait for one.
        kv_bytes: KV memory held.
        steps: Forwards so far.
        tokens: Tokens generated so far.
        preempted: Requests that lost their slot and were run again.
    """

    running: int = 0
    waiting: int = 0
    kv_bytes: int = 0
    steps: int = 0
    tokens: int = 0
    preempted: int = 0


class Engine:
    """Continuous batching over one model."""

    def __init__(
        self,
        model: Model,
        *,
        max_running: int = 64,
        prefill_tokens: int = 4096,
        kv_bytes: int | None = None,
    ) -> None:
        """Take a model into service.

        Args:
            model: The only copy of the weights.
            max_running: The most requests that share a decode.
            prefill_tokens: The most tokens, padding included, of one prefill; a longer prompt goes alone.
            kv_bytes: The most KV memory; by default half of what is free now.
        """
        self.model = model
        self.max_running = max_running
        self.prefill_tokens = prefill_tokens
        self.statistics = Statistics()
        self.step_began: float | None = None  # monotonic seconds; None between steps
        self._memory = Memory(model, max_running, kv_bytes)
        self._cache = self._memory.cache
        self._recorder = Recorder(model.device)
        self._inbox: queue.SimpleQueue[Request | str | None] = queue.SimpleQueue()
        self._waiting: deque[Row] = deque()
        self._running: list[Row] = []  # by slot
        self._arrivals = itertools.count()
        self._prefilled = False
        self._stopping = False

    # ---- for any thread

    def check(self, request: Request) -> None:
        """Refuse what could never run.

        Raises:
            RequestError: An empty prompt, more tokens than the context or the KV memory holds, or settings
                that this model or the request's own length cannot meet.
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
            message = f"{most} tokens need more KV memory than the server's {self._memory.budget} positions"
            raise RequestError(message, "max_tokens", "kv_memory_exceeded")
        check_sampling(request, self.model.vocabulary)

    def submit(self, request: Request) -> None:
        """Queue a request that `check` let pass; its events come from `step`."""
        self._inbox.put(request)

    def cancel(self, request_id: str) -> None:
        """End a request where it stands; its last event says "cancelled". Unknown ids do nothing."""
        self._inbox.put(request_id)

    def stop(self) -> None:
        """Make `run` return after its step."""
        self._stopping = True
        self._inbox.put(None)

    # ---- for the thread that owns the model

    def run(self, emit: Callable[[list[Event]], None]) -> None:
        """Step until stopped, handing on each step's events; wait where there is nothing to do."""
        while not self._stopping:
            if not self._running and not self._waiting:
                self._receive(self._inbox.get())
            events = self.step()
            if events:
                emit(events)

    def generate(self, requests: Iterable[Request]) -> list[Finished]:
        """Run requests together to their end and give their last events, in order.

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
        done: dict[str, Finished] = {}
        while len(done) < len(requests):
            done.update((event.id, event) for event in self.step() if isinstance(event, Finished))
        return [done[request.id] for request in requests]

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """One round: take in what was sent, run one forward, and say what it brought."""
        self.step_began = time.monotonic()
        events: list[Event] = []
        while not self._inbox.empty():
            self._receive(self._inbox.get(), events)
        # A prefill is followed by a decode, so that running requests do not stand still behind new ones.
        admitted = [] if self._prefilled and self._running else self._admit()
        self._prefilled = bool(admitted)
        if admitted:
            self._guarded(self._prefill, admitted, events)
        elif self._running:
            self._guarded(self._decode, self._running, events)
        self._count()
        self.step_began = None
        return events

    def _receive(self, message: Request | str | None, events: list[Event] | None = None) -> None:
        if isinstance(message, Request):
            capture = message.capture
            recording = Recording(capture, message.points, len(message.prompt)) if capture else None
            text = TextStream(self.model.tokenizer, message.stop)
            sampler = Sampler(message, self.model.eos, self.model.hf.get_output_embeddings().out_features)
            self._waiting.append(Row(message, text, sampler, recording, next(self._arrivals)))
        elif isinstance(message, str):
            self._cancel(message, events if events is not None else [])

    def _cancel(self, request_id: str, events: list[Event]) -> None:
        for row in self._waiting:
            if row.request.id == request_id:
                self._waiting.remove(row)
                events.append(Finished(request_id, "cancelled", row.request.prompt, row.tokens))
                return
        for row in self._running:
            if row.request.id == request_id:
                self._finish(row, "cancelled", events)
                return

    # ---- admission

    def _admit(self) -> list[Row]:
        """Take waiting requests, first come first served, while slots, KV memory and the token budget last."""
        admitted: list[Row] = []
        longest = 0
        need = max((row.need for row in self._running), default=0)
        while self._waiting and len(self._running) + len(admitted) < self.max_running:
            row = self._waiting[0]
            longest = max(longest, len(row.request.prompt) + len(row.tokens))
            need = max(need, row.need)
            slots = len(self._running) + len(admitted) + 1
            if admitted and longest * (len(admitted) + 1) > self.prefill_tokens:
                break
            if slots > 1 and not self._memory.fits(slots, need):
                break
            admitted.append(self._waiting.popleft())
        return admitted

    def _make_room(self) -> None:
        """Grow for the longest row's next token; while that exceeds the budget, the youngest row waits again."""
        while (longest := max(row.fed for row in self._running) + 1) > self._cache.window.capacity:
            if len(self._running) == 1 or self._memory.fits(len(self._running), longest):
                return self._memory.reserve(len(self._running), longest, keep=True)
            youngest = max(self._running, key=lambda row: row.arrival)
            self._remove(youngest)
            youngest.fed = 0
            self._waiting.appendleft(youngest)
            self.statistics.preempted += 1
        return None

    # ---- forwards

    def _prefill(self, rows: Sequence[Row], events: list[Event]) -> None:
        first = len(self._running)
        need = max(row.need for row in (*rows, *self._running))
        self._memory.reserve(first + len(rows), need, keep=bool(self._running))
        sequences = [row.sequence for row in rows]
        longest = max(map(len, sequences))
        padded = [sequence + [0] * (longest - len(sequence)) for sequence in sequences]
        device = self.model.device
        ids = torch.tensor(padded, device=device)  # [rows, longest]
        lengths = torch.tensor([len(sequence) for sequence in sequences], device=device)
        recordings = [(i, row.recording) for i, row in enumerate(rows) if row.recording and row.records_prefill]
        places = places_of(recording for _, recording in recordings)

        def take(place: Place, value: torch.Tensor) -> None:
            for i, recording in recordings:
                recording.add(place, value[i, recording.rows : len(sequences[i])])

        self._cache.prefill(first)
        every = any(place.module == self.model.head for place in places)
        logits = self.model.prefill(ids, lengths, self._cache, places, take, every_logit=every)
        for row, sequence in zip(rows, sequences, strict=True):
            row.fed = len(sequence)
            if row.recording:
                row.recording.rows = row.fed
                if row.recording.wants_generated:
                    self._recorder.join(len(self._running), row.recording)
            self._running.append(row)
        self._advance(list(rows), logits, events)

    def _decode(self, _: Sequence[Row], events: list[Event]) -> None:
        self._make_room()
        rows = list(self._running)
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
        self._advance(rows, logits, events)

    def _guarded(
        self, forward: Callable[[Sequence[Row], list[Event]], None], rows: Sequence[Row], events: list[Event]
    ) -> None:
        """Run a forward; an error ends its rows, and the engine goes on."""
        rows = list(rows)
        try:
            forward(rows, events)
        except AssertionError:
            raise  # the engine's own invariant is broken: it must not go on
        except Exception as error:
            logger.exception("a forward of %d requests failed", len(rows))
            ended = {event.id for event in events if isinstance(event, Finished)}
            message = f"{type(error).__name__}: {error}"
            for row in rows:
                if row in self._running:
                    self._finish(row, "error", events, message)
                elif row not in self._waiting and row.request.id not in ended:
                    events.append(Finished(row.request.id, "error", row.request.prompt, error=message))

    # ---- what a forward brought

    def _advance(self, rows: list[Row], logits: torch.Tensor, events: list[Event]) -> None:
        """Draw each row's next token from logits [rows, vocabulary], and end what has come to its end."""
        chosen = choose(logits, [None if row.ending else row.sampler for row in rows])
        # From the last slot down, since the last row moves into a freed slot.
        for i, row in reversed(list(enumerate(rows))):
            if i in chosen.failed:
                self._finish(row, "error", events, chosen.failed[i])
            elif row.ending:
                self._finish(row, row.ending, events)
            else:
                self._accept(row, chosen.tokens[i], chosen.logprobs.get(i), events)

    def _accept(self, row: Row, token: int, logprob: Logprob | None, events: list[Event]) -> None:
        request = row.request
        if request.max_tokens == 0:
            return self._finish(row, "length", events)
        row.tokens.append(token)
        row.sampler.add(token)
        self.statistics.tokens += 1
        ended = token in row.sampler.ends
        logprobs = (logprob._replace(offset=row.text.length),) if logprob else ()
        text = "" if ended else row.text.add(token, may_stop=len(row.tokens) >= request.sampling.min_tokens)
        if ended or row.text.stopped:
            row.ending = "stop"
        elif len(row.tokens) == request.max_tokens:
            row.ending = "length"
        if row.ending:
            text += row.text.close(row.tokens[:-1] if ended else row.tokens)
        events.append(Delta(request.id, (token,), text, logprobs))
        if row.ending and not (row.recording and row.recording.wants_generated):
            return self._finish(row, row.ending, events)
        return None

    def _finish(self, row: Row, reason: FinishReason, events: list[Event], error: str | None = None) -> None:
        self._remove(row)
        captured = None
        if row.recording and reason in ("stop", "length"):
            try:
                captured = row.recording.finish(len(row.request.prompt) + len(row.tokens))
            except (CaptureError, RuntimeError) as failed:  # torch's: no memory to join what was recorded
                error = str(failed)
        events.append(Finished(row.request.id, reason, row.request.prompt, row.tokens, captured, error))

    def _remove(self, row: Row) -> None:
        """Free a row's slot; the last row moves into it."""
        slot, last = self._running.index(row), len(self._running) - 1
        self._recorder.leave(slot)
        self._recorder.move(last, slot)
        self._cache.release(slot, last)
        self._running[slot] = self._running[last]
        self._running.pop()

    def _count(self) -> None:
        self.statistics.running = len(self._running)
        self.statistics.waiting = len(self._waiting)
        self.statistics.kv_bytes = self._cache.bytes
        self.statistics.steps += 1
