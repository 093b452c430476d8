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
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from deployments.engine import memory
from deployments.engine.batch import Batch
from deployments.engine.forwards import Forwards, Outcome
from deployments.engine.lens import check_lens
from deployments.engine.memory import KvMemory, held_bytes
from deployments.engine.model import Model
from deployments.engine.outflow import Outflow
from deployments.engine.recorder import Recorder
from deployments.engine.recording import CaptureError, Recording, joined
from deployments.engine.request import (
    TOO_COMPLEX,
    Captured,
    Delta,
    Event,
    Finished,
    FinishReason,
    LayerLens,
    Logprob,
    PromptLogprobs,
    Request,
    Rows,
)
from deployments.engine.row import Row
from deployments.engine.sampler import Sampler
from deployments.engine.sampling import NOT_FINITE, check_sampling, choose
from deployments.engine.schedule import Schedule
from deployments.engine.scoring import PromptScores
from deployments.engine.statistics import Statistics
from deployments.engine.text import TextStream
from deployments.errors import RequestError
from deployments.points.token_choices import resolve

logger = logging.getLogger(__name__)


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
        prefill_tokens: int | None = None,
        kv_bytes: int | None = None,
        kv_fraction: float | None = None,
        capture_bytes: int | None = None,
    ) -> None:
        """Take a model into service.

        Args:
            model: The only copy of the weights.
            max_running: The most requests that share a decode.
            prefill_tokens: The most tokens, padding included, of one prefill, of which a fifth is used while
                streamed requests decode; a longer prompt goes in pieces. By default 1,024 on a CPU and 4,096 on a GPU.
            kv_bytes: The most KV memory; without it, `kv_fraction` of what is free now.
            kv_fraction: A part of the free memory; half unless given.
            capture_bytes: Host memory for recorded rows. Rows are then handed out in pieces as `Rows`, and
                whoever takes them calls `written`; None leaves them with their request until its end.
        """
        self.model = model
        self.statistics = Statistics()
        self.step_began: float | None = None  # monotonic seconds; None between steps
        self._queued = set[str]()  # requests that no forward has taken yet
        self._memory = KvMemory(model, max_running, kv_bytes, kv_fraction)
        self._cache = self._memory.cache
        recorder = Recorder(model.device)
        self._batch = Batch(self._cache, recorder)
        self._forwards = Forwards(model, self._memory, self._batch, recorder)
        prefill_tokens = prefill_tokens or (1024 if model.device.type == "cpu" else 4096)
        self._outflow = Outflow(capture_bytes)
        self._schedule = Schedule(self._memory, max_running, prefill_tokens, self._outflow)
        self._inbox: queue.SimpleQueue[Request | str | _Written | None] = queue.SimpleQueue()
        self._arrivals = itertools.count()
        self._prefilled = False
        self._idle = True
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
        if request.max_tokens < 0:
            raise RequestError("there are no fewer than 0 new tokens", "max_tokens")
        if min(request.prompt) < 0 or max(request.prompt) >= self.model.vocabulary:
            raise RequestError(f"token ids go from 0 to {self.model.vocabulary - 1}", "prompt")
        if prompt + min(request.max_tokens, 1) > context:
            message = f"the prompt has {prompt} tokens, this model's context is {context} with the answer"
            raise RequestError(message, "prompt", "context_length_exceeded")
        if prompt + request.max_tokens > context:
            message = f"{prompt} prompt tokens and {request.max_tokens} new ones exceed the context of {context}"
            raise RequestError(message, "max_tokens", "context_length_exceeded")
        most = prompt + request.max_tokens
        if not self._memory.fits(1, most):
            needed, held = most * self._memory.position_bytes, self._memory.budget * self._memory.position_bytes
            message = f"{most} tokens need {needed} bytes of KV memory or more, the server's budget is {held}"
            raise RequestError(message, "max_tokens", "kv_memory_exceeded")
        check_sampling(request, self.model.vocabulary)
        if request.capture:
            resolve(request.capture.tokens, prompt, "capture.tokens")
        if request.lens:
            check_lens(request.lens, self.model.unembedding)

    def room(self, prompt: int) -> int:
        """The most new tokens that a prompt of so many tokens leaves room for in context and KV memory."""
        return max(1, min(self.model.context, self._memory.longest) - prompt)

    def submit(self, request: Request) -> None:
        """Queue a request that `check` let pass; its events come from `step`."""
        self._queued.add(request.id)
        self._inbox.put(request)

    def has_begun(self, request_id: str) -> bool:
        """Whether a request that was submitted has left the queue."""
        return request_id not in self._queued

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
            RuntimeError: Others are under way, whose events would be lost.
        """
        requests = list(requests)
        if len({request.id for request in requests}) < len(requests):
            raise RequestError("two requests have the same id", "id")
        for request in requests:
            self.check(request)
        for request in requests:
            self.submit(replace(request, streamed=False))
        pieces: dict[str, list[Captured]] = {request.id: [] for request in requests}
        done: dict[str, Finished] = {}
        try:
            while len(done) < len(requests):
                for event in self.step(wait=True):
                    if event.id not in pieces:
                        raise RuntimeError(f"request {event.id!r} is under way: take its events from `step` first")
                    if isinstance(event, (Delta, PromptLogprobs)):
                        continue
                    if event.captured is not None:
                        pieces[event.id].append(event.captured)
                        self.written(event.id, event.captured.bytes)
                    if isinstance(event, Finished):
                        whole = joined(pieces[event.id]) if event.captured is not None else None
                        done[event.id] = replace(event, captured=whole)
        finally:
            if left := pieces.keys() - done.keys():  # interrupted
                for request_id in left:
                    self.cancel(request_id)
                with torch.inference_mode():
                    self._receive_all([])
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
        self.step_began = began = time.monotonic()
        self._receive_all(events)
        # A prefill is followed by a decode, so that running requests do not stand still behind new ones.
        decoding = list(self._batch.decoding)
        prefill = None if self._prefilled and decoding else self._schedule.next_prefill(self._batch)
        self._prefilled = prefill is not None
        self._idle = not prefill and not decoding
        tokens = self.statistics.tokens
        if prefill:
            self._queued.difference_update(row.request.id for row in prefill.rows)
            self._outflow.divide({*self._schedule.recording(self._batch), *prefill.rows})
            self._forward(lambda: self._forwards.prefill(prefill), prefill.rows, events)
        elif decoding:
            self._forward(self._decode, decoding, events)
        if not self._idle:
            self.statistics.count_step(time.monotonic() - began, self.statistics.tokens - tokens)
        self._note()
        self.step_began = None
        return events

    def _receive_all(self, events: list[Event]) -> None:
        while not self._inbox.empty():
            self._receive(self._inbox.get(), events)

    def _receive(self, message: Request | str | _Written | None, events: list[Event]) -> None:
        if isinstance(message, Request):
            capture = message.capture
            recording = None
            if capture:
                recording = Recording(capture, message.points, len(message.prompt), message.max_tokens)
            text = TextStream(self.model.tokenizer, message.stop, message.markers)
            vocabulary = self.model.hf.get_output_embeddings().out_features
            sampler = Sampler(message, self.model.eos, vocabulary)
            scores = PromptScores(message, vocabulary) if message.prompt_logprobs is not None else None
            self._schedule.waiting.append(Row(message, text, sampler, recording, next(self._arrivals), scores))
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

    # ---- one forward

    def _forward(self, run: Callable[[], Outcome], rows: Sequence[Row], events: list[Event]) -> None:
        """Run a forward and take what it brings; an error ends its rows, and the engine goes on."""
        device = self.model.device
        for row in rows:
            row.memory.before = row.memory.before or held_bytes(device)
        failed = out_of_memory = None
        try:
            self._advance(run(), events)
            self._schedule.went_well()
        except AssertionError:
            raise  # the engine's own invariant is broken: it must not go on
        except Exception as error:
            logger.exception("a forward of %d requests failed", len(rows))
            failed = f"{type(error).__name__}: {error}"
            out_of_memory = memory.describe(device, error) if memory.is_out_of_memory(error) else None
        if failed:  # outside of the handler, whose error holds on to the forward's tensors
            self._recover(rows, failed, out_of_memory, events)
        peak = memory.peak_bytes(device)
        for row in rows:
            row.memory.peak = max(row.memory.peak, peak)
        self._send_rows(events)
        self._settle()

    def _decode(self) -> Outcome:
        self._make_room()
        return self._forwards.decode()

    def _send_rows(self, events: list[Event]) -> None:
        rows = self._schedule.recording(self._batch)
        self._outflow.divide(rows)
        for row in rows:
            assert row.recording is not None
            try:
                captured = row.recording.flush(row.sequence)
            except (CaptureError, RuntimeError, MemoryError) as error:  # torch's: no memory for another dtype
                row.recording.give_up(str(error))
            else:
                if captured is not None:
                    self._outflow.sent(row, captured.bytes)
                    events.append(Rows(row.request.id, captured))

    def _settle(self) -> None:
        """Let rows stand still that hold too many recorded bytes, and put each row where it belongs."""
        share = self._outflow.share(self._schedule.recording(self._batch))
        for row in list(self._batch.rows):
            row.stalled = self._outflow.stalls(row, share)
            self._batch.settle(row)

    # ---- what goes wrong

    def _recover(self, rows: Sequence[Row], failed: str, out_of_memory: str | None, events: list[Event]) -> None:
        """After a failed forward: end its rows, or, where there was no memory, as few of them as can be."""
        batch = self._batch
        ended = {event.id for event in events if isinstance(event, Finished)}
        rows = [row for row in rows if row.request.id not in ended and row not in self._schedule.waiting]
        for slot, row in enumerate(row for row in rows if row not in batch):
            if row.written:  # in some layers
                self._cache.clear(len(batch) + slot, row.written)
                row.written = 0
        if out_of_memory is None:
            return self._fail(rows, failed, "engine_error", events)
        self.statistics.out_of_memory += 1
        memory.release_cached(self.model.device)
        relieved = self._relieve(rows)
        with contextlib.suppress(RuntimeError, MemoryError):  # then it stays as large as it is
            self._memory.trim(len(batch), max((row.written for row in batch.rows), default=0) + 1)
        for row in () if relieved else rows:
            size = memory.mib(row.need * self._memory.position_bytes)
            message = (
                f"out of memory: {out_of_memory}; this request has {len(row.request.prompt)} prompt and "
                f"{len(row.tokens)} generated tokens of up to {row.request.max_tokens}, {size} of keys and values: "
                "ask for less"
            )
            self._fail([row], message, "out_of_memory", events)
        return None

    def _relieve(self, rows: Sequence[Row]) -> bool:
        """Ask less of the next forwards than of one that found no memory; false where that is not possible."""
        batch, schedule = self._batch, self._schedule
        decoded = all(row in batch.decoding for row in rows)
        tokens = sum(min(row.length - row.fed, schedule.tokens) for row in rows)
        schedule.put_back([row for row in rows if row not in batch])
        for row in rows:
            if row in batch and row.fed == row.length:  # run, but its next token was not drawn
                self._preempt(row)
        if decoded:
            youngest = sorted(batch.rows, key=lambda row: row.arrival)[(len(batch) + 1) // 2 :]
            for row in reversed(youngest):
                self._preempt(row)
            schedule.limit_rows(len(batch) or len(rows) // 2)
            return len(rows) > 1 or bool(youngest)
        if schedule.halve_tokens(tokens):
            return True
        for row in rows:
            if row in batch:
                self._preempt(row)
        schedule.limit_rows(len(batch) + len(rows) // 2)
        return len(rows) > 1 or len(batch) > 0  # others have the memory: it waits for their end

    def _fail(self, rows: Sequence[Row], message: str, code: str, events: list[Event]) -> None:
        for row in rows:
            self._finish(row, "error", events, message, code)

    # ---- what a forward brought

    def _advance(self, outcome: Outcome, events: list[Event]) -> None:
        """Draw each row's next token, and end what has come to its end."""
        rows, logits, lens = outcome
        if not rows:
            return
        chosen = choose(logits, [None if row.ending else row.sampler for row in rows])
        for i, row in enumerate(rows):
            if row.ending:  # it is said; the forward was for its last row alone
                self._finish(row, row.ending, events)
            elif i in chosen.failed:
                code = TOO_COMPLEX if row.sampler.guide and row.sampler.guide.error else "engine_error"
                self._finish(row, "error", events, chosen.failed[i], code)
            else:
                self._accept(row, chosen.tokens[i], chosen.logprobs.get(i), lens.get(i), events)

    def _accept(
        self,
        row: Row,
        token: int,
        logprob: Logprob | None,
        layers: tuple[LayerLens, ...] | None,
        events: list[Event],
    ) -> None:
        request = row.request
        if row.scores:
            scores, row.scores = row.scores, None
            if not scores.finite:
                return self._finish(row, "error", events, NOT_FINITE)
            events.append(PromptLogprobs(request.id, tuple(scores.logprobs)))
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
        lens = () if layers is None else (layers,)
        delta = Delta(request.id, (token,), text, logprobs, lens)
        if request.streamed:
            events.append(delta)
        else:
            row.unsaid.append(delta)
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
        self._queued.discard(row.request.id)
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
            except (CaptureError, RuntimeError, MemoryError) as failed:  # torch's: no memory for another dtype
                error = str(failed)
        row.memory.after = held_bytes(self.model.device)
        request = row.request
        rest = Delta.of(row.unsaid) if row.unsaid else None
        seen = tuple(row.prompt_lens)
        end = Finished(request.id, reason, request.prompt, row.tokens, captured, error, code, row.memory, rest, seen)
        events.append(end)

    def _note(self) -> None:
        numbers = self.statistics
        numbers.running = len(self._batch)
        numbers.waiting = len(self._schedule.waiting)
        numbers.slots = self._cache.window.slots
        numbers.kv_bytes = self._cache.bytes
        numbers.kv_budget_bytes = self._memory.budget * self._memory.position_bytes
        gathered = sum(row.recording.bytes for row in self._schedule.recording(self._batch) if row.recording)
        numbers.capture_bytes = gathered + self._outflow.bytes
