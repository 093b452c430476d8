"""The engine: admit -> forward -> sample -> emit, for all requests at once.

One thread owns the model and calls `step` (or `run`, which does nothing else); any thread may `submit`,
`cancel` and say what was `written`. Requests under way hold KV slots. Each step is one forward: a prefill of
new requests, the next piece of a long prompt, or one token for all requests whose prompts are in.
"""

from __future__ import annotations

import collections.abc
import contextlib
import itertools
import logging
import queue
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

import torch

from deployments.engine import kv_memory
from deployments.engine.batch import Batch
from deployments.engine.capture.buffer import CaptureBuffer, CaptureError, joined
from deployments.engine.capture.captured import Captured
from deployments.engine.capture.ring import CaptureRing
from deployments.engine.capture_budget import CaptureBudget
from deployments.engine.gates import Leaf
from deployments.engine.kv_memory import KvMemory, held_bytes
from deployments.engine.logit_lens import check_lens
from deployments.engine.prompt_logprobs import PromptScores
from deployments.engine.readouts import SequenceReadouts, with_columns
from deployments.engine.request import (
    GRAMMAR_TOO_COMPLEX,
    Delta,
    Event,
    Finished,
    FinishReason,
    LayerTokens,
    Logprob,
    PromptLogprobs,
    Request,
    Rows,
    StopReason,
)
from deployments.engine.runner import ForwardResult, Runner
from deployments.engine.sampling import NOT_FINITE, check_sampling, choose
from deployments.engine.sampling_state import SamplingState
from deployments.engine.scheduler import Scheduler
from deployments.engine.sequence import Sequence
from deployments.engine.statistics import Statistics
from deployments.engine.text import TextStream
from deployments.errors import RequestError
from deployments.model.model import Model
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
        ring = CaptureRing(model.device)
        self._batch = Batch(self._cache, ring)
        self._runner = Runner(model, self._memory, self._batch, ring)
        prefill_tokens = prefill_tokens or (1024 if model.device.type == "cpu" else 4096)
        self._capture_budget = CaptureBudget(capture_bytes)
        self._scheduler = Scheduler(self._memory, max_running, prefill_tokens, self._capture_budget)
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
        first = self._inbox.get() if wait and self._idle else None
        self.step_began = began = time.monotonic()
        self._receive(first, events)
        self._receive_all(events)
        # A prefill is followed by a decode, so that running requests do not stand still behind new ones.
        decoding = list(self._batch.decoding)
        prefill = None if self._prefilled and decoding else self._scheduler.next_prefill(self._batch)
        self._prefilled = prefill is not None
        self._idle = not prefill and not decoding
        tokens = self.statistics.tokens
        if prefill:
            self._queued.difference_update(seq.request.id for seq in prefill.sequences)
            self._capture_budget.divide({*self._scheduler.recording(self._batch), *prefill.sequences})
            self._forward(lambda: self._runner.prefill(prefill), prefill.sequences, events)
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
                recording = CaptureBuffer(capture, message.points, len(message.prompt), message.max_tokens)
            text = TextStream(self.model.tokenizer, message.stop, message.markers)
            vocabulary = self.model.hf.get_output_embeddings().out_features
            sampling_state = SamplingState(message, self.model.eos, vocabulary)
            scores = PromptScores(message, vocabulary) if message.prompt_logprobs is not None else None
            seq = Sequence(message, text, sampling_state, recording, next(self._arrivals), scores)
            seq.readouts = SequenceReadouts(message) if message.readouts else None
            self._scheduler.waiting.append(seq)
        elif isinstance(message, str):
            self._cancel(message, events)
        elif isinstance(message, _Written):
            self._capture_budget.written(message.id, message.bytes)
            self._settle()

    def _cancel(self, request_id: str, events: list[Event]) -> None:
        for seq in (*self._scheduler.waiting, *self._batch.sequences):
            if seq.request.id == request_id:
                return self._finish(seq, "cancelled", events)
        return None

    # ---- room

    def _make_room(self) -> None:
        """Grow for the next token of the longest; while that exceeds the budget, the youngest waits again."""
        batch = self._batch
        while (longest := max(seq.fed for seq in batch.decoding) + 1) > self._cache.window.capacity:
            if len(batch) == 1 or self._memory.fits(len(batch), longest):
                return self._memory.reserve(len(batch), longest, keep=True)
            self._preempt(max(batch.sequences, key=lambda seq: seq.arrival))
            if not batch.decoding:
                return None
        return None

    def _preempt(self, seq: Sequence) -> None:
        """Take a sequence's slot; its tokens and what it recorded stay, and it is run again from its beginning."""
        self._batch.remove(seq)
        seq.stalled = False
        self._scheduler.put_back([seq])
        self.statistics.preempted += 1

    # ---- one forward

    def _forward(
        self, run: Callable[[], ForwardResult], seqs: collections.abc.Sequence[Sequence], events: list[Event]
    ) -> None:
        """Run a forward and take what it brings; an error ends its sequences, and the engine goes on."""
        device = self.model.device
        for seq in seqs:
            seq.memory.before = seq.memory.before or held_bytes(device)
        failed = out_of_memory = None
        try:
            self._advance(run(), events)
            self._scheduler.went_well()
        except Exception as error:
            if _breaks_an_invariant(error):
                raise
            logger.exception("a forward of %d requests failed", len(seqs))
            failed = f"{type(error).__name__}: {error}"
            out_of_memory = kv_memory.describe(device, error) if kv_memory.is_out_of_memory(error) else None
        if failed:  # outside of the handler, whose error holds on to the forward's tensors
            self._recover(seqs, failed, out_of_memory, events)
        peak = kv_memory.peak_bytes(device)
        for seq in seqs:
            seq.memory.peak = max(seq.memory.peak, peak)
        self._send_rows(events)
        self._settle()

    def _decode(self) -> ForwardResult:
        self._make_room()
        return self._runner.decode()

    def _send_rows(self, events: list[Event]) -> None:
        seqs = self._scheduler.recording(self._batch)
        self._capture_budget.divide(seqs)
        for seq in seqs:
            assert seq.recording is not None
            try:
                captured = seq.recording.flush(seq.token_ids)
            except (CaptureError, RuntimeError, MemoryError) as error:  # torch's: no memory for another dtype
                seq.recording.give_up(str(error))
            else:
                if captured is not None:
                    self._capture_budget.sent(seq, captured.bytes)
                    captured = with_columns(captured, seq.request, seq.readouts)
                    events.append(Rows(seq.request.id, captured))

    def _settle(self) -> None:
        """Let sequences stand still that hold too many recorded bytes, and put each sequence where it belongs."""
        share = self._capture_budget.share(self._scheduler.recording(self._batch))
        for seq in list(self._batch.sequences):
            seq.stalled = self._capture_budget.stalls(seq, share)
            self._batch.settle(seq)

    # ---- what goes wrong

    def _recover(
        self, seqs: collections.abc.Sequence[Sequence], failed: str, out_of_memory: str | None, events: list[Event]
    ) -> None:
        """After a failed forward: end its sequences, or, where there was no memory, as few of them as can be."""
        batch = self._batch
        ended = {event.id for event in events if isinstance(event, Finished)}
        seqs = [seq for seq in seqs if seq.request.id not in ended and seq not in self._scheduler.waiting]
        for slot, seq in enumerate(seq for seq in seqs if seq not in batch):
            if seq.written:  # in some layers
                self._cache.clear(len(batch) + slot, seq.written)
                seq.written = 0
        if out_of_memory is None:
            return self._fail(seqs, failed, "engine_error", events)
        self.statistics.out_of_memory += 1
        kv_memory.release_cached(self.model.device)
        relieved = self._relieve(seqs)
        with contextlib.suppress(RuntimeError, MemoryError):  # then it stays as large as it is
            self._memory.trim(len(batch), max((seq.written for seq in batch.sequences), default=0) + 1)
        for seq in () if relieved else seqs:
            size = kv_memory.mib(seq.need * self._memory.position_bytes)
            message = (
                f"out of memory: {out_of_memory}; this request has {len(seq.request.prompt)} prompt and "
                f"{len(seq.tokens)} generated tokens of up to {seq.request.max_tokens}, "
                f"{size} of keys and values: "
                "ask for less"
            )
            self._fail([seq], message, "out_of_memory", events)
        return None

    def _relieve(self, seqs: collections.abc.Sequence[Sequence]) -> bool:
        """Ask less of the next forwards than of one that found no memory; false where that is not possible."""
        batch, scheduler = self._batch, self._scheduler
        decoded = all(seq in batch.decoding for seq in seqs)
        tokens = sum(min(seq.length - seq.fed, scheduler.tokens) for seq in seqs)
        scheduler.put_back([seq for seq in seqs if seq not in batch])
        for seq in seqs:
            if seq in batch and seq.fed == seq.length:  # run, but its next token was not drawn
                self._preempt(seq)
        if decoded:
            youngest = sorted(batch.sequences, key=lambda seq: seq.arrival)[(len(batch) + 1) // 2 :]
            for seq in reversed(youngest):
                self._preempt(seq)
            scheduler.limit_sequences(len(batch) or len(seqs) // 2)
            return len(seqs) > 1 or bool(youngest)
        if scheduler.halve_tokens(tokens):
            return True
        for seq in seqs:
            if seq in batch:
                self._preempt(seq)
        scheduler.limit_sequences(len(batch) + len(seqs) // 2)
        return len(seqs) > 1 or len(batch) > 0  # others have the memory: it waits for their end

    def _fail(self, seqs: collections.abc.Sequence[Sequence], message: str, code: str, events: list[Event]) -> None:
        for seq in seqs:
            self._finish(seq, "error", events, message, code)

    # ---- what a forward brought

    def _advance(self, outcome: ForwardResult, events: list[Event]) -> None:
        """Draw each sequence's next token, and end what has come to its end."""
        seqs, logits, lens, stopped = outcome
        if not seqs:
            return
        chosen = choose(logits, [None if seq.ending else seq.sampling_state for seq in seqs])
        for i, seq in enumerate(seqs):
            if seq.ending:  # it is said; the forward was for its last row alone
                self._finish(seq, seq.ending, events)
            elif i in stopped and len(seq.tokens) >= seq.request.sampling.min_tokens and seq.request.max_tokens:
                self._stop(seq, *stopped[i], events)
            elif i in chosen.failed:
                code = (
                    GRAMMAR_TOO_COMPLEX
                    if seq.sampling_state.grammar_state and seq.sampling_state.grammar_state.error
                    else "engine_error"
                )
                self._finish(seq, "error", events, chosen.failed[i], code)
            else:
                try:
                    self._accept(seq, chosen.tokens[i], chosen.logprobs.get(i), lens.get(i), events)
                except Exception as error:
                    if _breaks_an_invariant(error):
                        raise
                    # A tokenizer's or a grammar's own fault at this sequence's token: the others' tokens count.
                    logger.exception("request %s failed on its token", seq.request.id)
                    self._finish(seq, "error", events, f"{type(error).__name__}: {error}")

    def _stop(self, seq: Sequence, leaf: Leaf, position: int, events: list[Event]) -> None:
        """End an answer at a row that met its `stop_when`: its token was said, and no other follows."""
        value = float(leaf.value) if leaf.value is not None else float("nan")
        seq.stop_reason = StopReason(leaf.source.name, value, position)
        if text := seq.text.close(seq.tokens):
            self._say(seq, Delta(seq.request.id, (), text), events)
        self._finish(seq, "stop", events)

    def _say(self, seq: Sequence, delta: Delta, events: list[Event]) -> None:
        """Say what a step added now, or keep it for the end."""
        if seq.request.streamed:
            events.append(delta._replace(readouts=seq.readouts.take()) if seq.readouts else delta)
        else:
            seq.unsaid.append(delta)

    def _accept(
        self,
        seq: Sequence,
        token: int,
        logprob: Logprob | None,
        layers: tuple[LayerTokens, ...] | None,
        events: list[Event],
    ) -> None:
        request = seq.request
        if seq.scores:
            scores, seq.scores = seq.scores, None
            if not scores.finite:
                return self._finish(seq, "error", events, NOT_FINITE)
            events.append(PromptLogprobs(request.id, tuple(scores.logprobs)))
        if request.max_tokens == 0:
            return self._finish(seq, "length", events)
        seq.tokens.append(token)
        seq.sampling_state.add(token)
        self.statistics.tokens += 1
        ended = token in seq.sampling_state.ends
        logprobs = (logprob._replace(offset=seq.text.length),) if logprob else ()
        text = "" if ended else seq.text.add(token, may_stop=len(seq.tokens) >= request.sampling.min_tokens)
        if ended or seq.text.stopped:
            seq.ending = "stop"
        elif len(seq.tokens) == request.max_tokens:
            seq.ending = "length"
        if seq.ending:
            text += seq.text.close(seq.tokens[:-1] if ended else seq.tokens)
        lens = () if layers is None else (layers,)
        self._say(seq, Delta(request.id, (token,), text, logprobs, lens), events)
        if seq.ending and not seq.wants_last:
            return self._finish(seq, seq.ending, events)
        return None

    def _finish(
        self,
        seq: Sequence,
        reason: FinishReason,
        events: list[Event],
        error: str | None = None,
        code: str = "engine_error",
    ) -> None:
        self._queued.discard(seq.request.id)
        if seq in self._batch:
            self._batch.remove(seq)
        else:
            with contextlib.suppress(ValueError):  # it is on its way from the queue to a slot
                self._scheduler.waiting.remove(seq)
        captured = None
        if seq.recording and reason in ("stop", "length"):
            try:
                captured = seq.recording.finish(seq.token_ids)
                self._capture_budget.sent(seq, captured.bytes)
                captured = with_columns(captured, seq.request, seq.readouts)
            except (CaptureError, RuntimeError, MemoryError) as failed:  # torch's: no memory for another dtype
                error = str(failed)
        seq.memory.after = held_bytes(self.model.device)
        request = seq.request
        rest = Delta.of(seq.unsaid) if seq.unsaid else None
        seen = tuple(seq.prompt_lens)
        end = Finished(request.id, reason, request.prompt, seq.tokens, captured, error, code, seq.memory, rest, seen)
        if seq.readouts:
            end = replace(end, readouts=seq.readouts.take(ended=True))
        if seq.stop_reason:
            end = replace(end, stop_reason=seq.stop_reason)
        events.append(end)

    def _note(self) -> None:
        numbers = self.statistics
        numbers.running = len(self._batch)
        numbers.waiting = len(self._scheduler.waiting)
        numbers.slots = self._cache.window.slots
        numbers.kv_bytes = self._cache.bytes
        numbers.kv_budget_bytes = self._memory.budget * self._memory.position_bytes
        gathered = sum(seq.recording.bytes for seq in self._scheduler.recording(self._batch) if seq.recording)
        numbers.capture_bytes = gathered + self._capture_budget.bytes


def _breaks_an_invariant(error: Exception) -> bool:
    """Whether an error is an assertion of the engine itself, which must not go on; a model's code may have its own."""
    if not isinstance(error, AssertionError):
        return False
    names = [str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(error.__traceback__)]
    return names[-1].startswith("deployments.")
