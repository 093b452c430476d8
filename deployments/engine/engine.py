"""The engine: admit -> forward -> sample -> emit, for all requests at once.

One thread owns the model and calls `step` (or `run`, which does nothing else); any thread may `submit`,
`cancel` and report rows as `written`. Each step is one forward pass: one token of every request whose prompt has run,
and chunks of prompts. `recovery.py` handles failed forward passes.
"""

from __future__ import annotations

import collections.abc
import itertools
import logging
import queue
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

import torch

from deployments.engine.capture.buffer import CaptureBuffer, CaptureError, joined
from deployments.engine.capture.captured import Captured
from deployments.engine.capture.ring import CaptureRing, window_bytes
from deployments.engine.capture_budget import CaptureBudget
from deployments.engine.decoding.lens_reader import check_lens
from deployments.engine.decoding.prompt_logprobs import PromptScores
from deployments.engine.decoding.sampling import NO_TOKEN_LEFT, NOT_FINITE, check_sampling, choose
from deployments.engine.decoding.sampling_state import SamplingState
from deployments.engine.decoding.text import TextStream
from deployments.engine.kv_memory import KvMemory
from deployments.engine.recovery import Recovery
from deployments.engine.request import (
    GRAMMAR_TOO_COMPLEX,
    Delta,
    Event,
    Finished,
    FinishReason,
    LayerTokens,
    Logprob,
    MemoryUse,
    PromptLogprobs,
    Request,
    Rows,
    StopReason,
)
from deployments.engine.runner import ForwardResult, Runner
from deployments.engine.scheduler import Chunk, Scheduler
from deployments.engine.sequence import Sequence
from deployments.engine.statistics import Statistics
from deployments.errors import RequestError
from deployments.model import device_memory
from deployments.model.kv_cache import PagedCache
from deployments.model.model import Model
from deployments.points.token_choices import resolve
from deployments.readouts.gates import Gate
from deployments.readouts.sequence import SequenceReadouts
from deployments.readouts.spec import ReadoutRows

MOST_BROKEN = 3  # consecutive failures of single requests by an assertion of the engine; the engine then ends

logger = logging.getLogger(__name__)


class _Written(NamedTuple):
    id: str
    bytes: int


class _Compiled:
    """A grammar that a sequence waits for has been compiled."""


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
        """Start the engine on a model.

        Args:
            model: The only copy of the weights.
            max_running: The most requests that decode together.
            prefill_tokens: The most prompt tokens of one forward pass; at most a fifth of it while streamed requests
                decode. A longer prompt runs in chunks. By default 1,024 on a CPU and 4,096 on a GPU.
            kv_bytes: The most KV memory; without it, `kv_fraction` of the memory that is free now.
            kv_fraction: A fraction of the free memory; half by default.
            capture_bytes: Host memory for recorded rows. Rows then leave in chunks as `Rows`, and their consumer calls
                `written`. None keeps all rows of a request until its end.
        """
        self.model = model
        self.statistics = Statistics()
        self.step_began: float | None = None  # monotonic seconds; None between steps
        self._queued = set[str]()  # requests that have not run yet
        self._memory = KvMemory(model, max_running, kv_bytes, kv_fraction)
        self._ring = CaptureRing(model.device, window_bytes(model.device, capture_bytes))
        self._runner = Runner(model, self._memory, self._ring)
        prefill_tokens = prefill_tokens or (1024 if model.device.type == "cpu" else 4096)
        self._capture_budget = CaptureBudget(capture_bytes)
        self._scheduler = Scheduler(self._memory, max_running, prefill_tokens, self._capture_budget, model.packs)
        self._recovery = Recovery(self._scheduler, self._memory, self._ring, self.statistics)
        self._inbox: queue.SimpleQueue[Request | str | _Written | _Compiled | None] = queue.SimpleQueue()
        self._arrivals = itertools.count()
        self._idle = True
        self._stopping = False
        self._ended: list[MemoryUse] = []  # of sequences that have ended in this step
        self._broken = 0  # consecutive forward passes of a single request that failed by an assertion of the engine

    @property
    def cache(self) -> PagedCache:
        """The pages of keys and values."""
        return self._memory.cache

    # ---- for any thread

    def check(self, request: Request) -> None:
        """Reject a request that can never run.

        Raises:
            RequestError: An empty prompt, more tokens than the context or the KV memory holds, or settings
                that this model or the request's length does not support.
        """
        prompt, context = len(request.prompt), self.model.context
        if not prompt:
            raise RequestError("the prompt has no tokens", "prompt")
        if request.max_tokens < 0:
            raise RequestError("max_tokens must be at least 0", "max_tokens")
        if min(request.prompt) < 0 or max(request.prompt) >= self.model.vocabulary:
            raise RequestError(f"token ids go from 0 to {self.model.vocabulary - 1}", "prompt")
        if prompt + min(request.max_tokens, 1) > context:
            message = (
                f"the prompt has {prompt} tokens; the context of this model, which also holds the answer, is {context}"
            )
            raise RequestError(message, "prompt", "context_length_exceeded")
        if prompt + request.max_tokens > context:
            message = f"{prompt} prompt tokens and {request.max_tokens} new ones exceed the context of {context}"
            raise RequestError(message, "max_tokens", "context_length_exceeded")
        most = prompt + request.max_tokens
        if most > self._memory.longest:
            needed = self._memory.most_held(most) * self._memory.position_bytes
            held = self._memory.budget_bytes
            message = f"{most} tokens need at least {needed} bytes of KV memory; the server's budget is {held}"
            raise RequestError(message, "max_tokens", "kv_memory_exceeded")
        check_sampling(request, self.model.vocabulary)
        if request.capture:
            resolve(request.capture.tokens, prompt, "capture.tokens")
        if request.lens:
            check_lens(request.lens, self.model.unembedding)

    def room(self, prompt: int) -> int:
        """The most new tokens that fit into the context and KV memory after `prompt` tokens."""
        return max(1, self._memory.longest - prompt)

    def submit(self, request: Request) -> None:
        """Queue a request that `check` has accepted; `step` returns its events."""
        self._queued.add(request.id)
        self._inbox.put(request)

    def has_begun(self, request_id: str) -> bool:
        """Whether a submitted request has left the queue."""
        return request_id not in self._queued

    def cancel(self, request_id: str) -> None:
        """End a request at once; its last event has the reason "cancelled". Unknown ids are ignored."""
        self._inbox.put(request_id)

    def written(self, request_id: str, size: int) -> None:
        """Report that `size` bytes of a request's released rows no longer need memory."""
        self._inbox.put(_Written(request_id, size))

    def stop(self) -> None:
        """Make `run` return after its step."""
        self._stopping = True
        self._inbox.put(None)

    # ---- for the thread that owns the model

    def run(self, emit: Callable[[list[Event]], None]) -> None:
        """Call `step` until stopped, and pass each step's events on; wait when there is nothing to do."""
        while not self._stopping:
            events = self.step(wait=True)
            if events:
                emit(events)

    def generate(self, requests: Iterable[Request]) -> list[Finished]:
        """Run requests together to their end and return their last events, in order, with all recorded rows.

        Raises:
            RequestError: One of them can never run, or two have the same id.
            RuntimeError: Other requests are running, whose events would be lost.
        """
        requests = list(requests)
        if len({request.id for request in requests}) < len(requests):
            raise RequestError("two requests have the same id", "id")
        for request in requests:
            self.check(request)
        for request in requests:
            self.submit(replace(request, streamed=False))
        chunks: dict[str, list[Captured]] = {request.id: [] for request in requests}
        done: dict[str, Finished] = {}
        try:
            while len(done) < len(requests):
                for event in self.step(wait=True):
                    if event.id not in chunks:
                        raise RuntimeError(f"request {event.id!r} is under way: take its events from `step` first")
                    if isinstance(event, (Delta, PromptLogprobs)):
                        continue
                    if event.captured is not None:
                        chunks[event.id].append(event.captured)
                        self.written(event.id, event.captured.bytes)
                    if isinstance(event, Finished):
                        whole = joined(chunks[event.id]) if event.captured is not None else None
                        done[event.id] = replace(event, captured=whole)
        finally:
            if left := chunks.keys() - done.keys():  # interrupted
                for request_id in left:
                    self.cancel(request_id)
                with torch.inference_mode():
                    self._receive_all([])
        return [done[request.id] for request in requests]

    @torch.inference_mode()
    def step(self, wait: bool = False) -> list[Event]:
        """Receive messages, run one forward pass, and return its events.

        Args:
            wait: Wait for a message if there is nothing to do.
        """
        events: list[Event] = []
        first = self._inbox.get() if wait and self._idle else None
        self.step_began = began = time.monotonic()
        self._receive(first, events)
        self._receive_all(events)
        chunks = self._scheduler.next_chunks()
        self._idle = not chunks
        tokens = self.statistics.tokens
        if chunks:
            self._queued.difference_update(chunk.sequence.request.id for chunk in chunks)
            self._capture_budget.divide(self._scheduler.recording)
            self._forward(chunks, events)
            self.statistics.count_step(time.monotonic() - began, self.statistics.tokens - tokens)
        self._note()
        self.step_began = None
        return events

    def _receive_all(self, events: list[Event]) -> None:
        while not self._inbox.empty():
            self._receive(self._inbox.get(), events)

    def _receive(self, message: Request | str | _Written | _Compiled | None, events: list[Event]) -> None:
        if isinstance(message, Request):
            try:
                self._scheduler.waiting.append(self._sequence(message))
            except Exception as error:  # an error of the request, such as in its grammar, ends only this request
                logger.exception("request %s failed before its first forward pass", message.id)
                self._queued.discard(message.id)
                said = f"{type(error).__name__}: {error}"
                events.append(Finished(message.id, "error", message.prompt, error=said))
        elif isinstance(message, str):
            self._cancel(message, events)
        elif isinstance(message, _Written):
            self._capture_budget.written(message.id, message.bytes)
            self._settle()
        elif isinstance(message, _Compiled):
            self._settle()

    def _sequence(self, request: Request) -> Sequence:
        """The state of a new request."""
        recording = None
        if request.capture:
            recording = CaptureBuffer(request.capture, request.points, len(request.prompt), request.max_tokens)
        before = request.prompt[-1] if request.continues else None
        text = TextStream(self.model.tokenizer, request.stop, request.markers, before)
        vocabulary = self.model.hf.get_output_embeddings().out_features
        sampling_state = SamplingState(request, self.model.eos, vocabulary)
        scores = PromptScores(request, vocabulary) if request.prompt_logprobs is not None else None
        seq = Sequence(request, text, sampling_state, recording, next(self._arrivals), scores)
        seq.readouts = SequenceReadouts(request.readouts, len(request.prompt)) if request.readouts else None
        return seq

    def _cancel(self, request_id: str, events: list[Event]) -> None:
        for seq in (*self._scheduler.waiting, *self._scheduler.running):
            if seq.request.id == request_id:
                return self._finish(seq, "cancelled", events)
        return None

    # ---- one forward pass

    def _forward(self, chunks: collections.abc.Sequence[Chunk], events: list[Event]) -> None:
        """Run a forward pass and process its result; an error ends only the failing sequence."""
        device = self.model.device
        if not all(chunk.sequence.memory.before for chunk in chunks):
            self._note_memory()
        failed = out_of_memory = None
        try:
            self._advance(self._runner.run(chunks), events)
            self._scheduler.went_well()
            self._broken = 0
        except Exception as error:  # by a request, the model's code or the device; only the requests selected below end
            self._broken += len(chunks) == 1 and _is_own_assertion(error)
            if self._broken == MOST_BROKEN or device_memory.is_broken(error):
                raise
            logger.exception("a forward of %d requests failed", len(chunks))
            failed = f"{type(error).__name__}: {error}"
            out_of_memory = device_memory.describe(device, error) if device_memory.is_out_of_memory(error) else None
        if failed:  # outside the handler, whose error keeps the forward pass's tensors alive
            for end in self._recovery.after(chunks, failed, out_of_memory):
                self._finish(end.sequence, "error", events, end.message, end.code)
        self._send_rows(events)
        self._settle()

    def _send_rows(self, events: list[Event]) -> None:
        seqs = self._scheduler.recording
        self._capture_budget.divide(seqs)
        for seq in seqs:
            assert seq.recording is not None
            try:
                captured = seq.recording.flush(lambda: seq.token_ids)  # noqa: B023 - called here or never
                if captured is not None:
                    captured = _with_columns(captured, seq.readouts)
            except Exception as error:  # noqa: BLE001 - any error ends only this request's recording
                seq.recording.give_up(_capture_failure(seq, error))
            else:
                if captured is not None:
                    self._capture_budget.sent(seq, captured.bytes)
                    events.append(Rows(seq.request.id, captured))

    def _settle(self) -> None:
        """Pause sequences that hold too many recorded bytes, or whose grammar is being compiled again."""
        share = self._capture_budget.share(self._scheduler.recording)
        for seq in self._scheduler.running:
            grammar_state = seq.sampling_state.grammar_state
            compiles = grammar_state is not None and grammar_state.compiles
            seq.stalled = compiles or self._capture_budget.stalls(seq, share)
            if seq.stalled and seq.recording:
                self._ring.leave(seq.recording)

    # ---- the result of a forward pass

    def _advance(self, outcome: ForwardResult, events: list[Event]) -> None:
        """Draw each sequence's next token, and finish the sequences that end."""
        seqs, logits, lens, stopped = outcome
        if not seqs:
            return
        ended = {i for i, seq in enumerate(seqs) if seq.ending or (i in stopped and seq.may_stop)}
        waiting = {i for i, seq in enumerate(seqs) if i not in ended and not self._may_draw(seq)}
        undrawn = ended | waiting
        chosen = choose(logits, [None if i in undrawn else seq.sampling_state for i, seq in enumerate(seqs)])
        for i, seq in enumerate(seqs):
            try:
                if seq.ending:  # its text is complete; this forward pass was for its last row
                    self._finish(seq, seq.ending, events)
                elif i in ended:
                    self._stop(seq, *stopped[i], events)
                elif i in chosen.failed:
                    own = chosen.failed[i] in (NOT_FINITE, NO_TOKEN_LEFT)
                    self._finish(seq, "error", events, chosen.failed[i], "engine_error" if own else GRAMMAR_TOO_COMPLEX)
                elif i in waiting:
                    seq.fed -= 1  # its last token runs again once its grammar is ready
                else:
                    self._accept(seq, chosen.tokens[i], chosen.logprobs.get(i), lens.get(i), events)
            except Exception as error:
                if device_memory.is_broken(error):
                    raise
                # The tokenizer or a grammar failed on this sequence's token: the other sequences continue.
                logger.exception("request %s failed on its token", seq.request.id)
                self._finish(seq, "error", events, f"{type(error).__name__}: {error}")

    def _may_draw(self, seq: Sequence) -> bool:
        """Whether a sequence's next token can be drawn now; otherwise another thread compiles its grammar first."""
        grammar_state = seq.sampling_state.grammar_state
        return grammar_state is None or grammar_state.ready(lambda: self._inbox.put(_Compiled()))

    def _stop(self, seq: Sequence, gate: Gate, position: int, events: list[Event]) -> None:
        """End an answer at a row that met its `stop_when`; that row's token was sent already."""
        if not self._say_scores(seq, events):
            return
        value = float(gate.value) if gate.value is not None else float("nan")
        seq.stop_reason = StopReason(gate.source.name, value, position)
        if text := seq.text.close(seq.tokens):
            self._say(seq, Delta(seq.request.id, (), text), events)
        self._finish(seq, "stop", events)

    def _say(self, seq: Sequence, delta: Delta, events: list[Event]) -> None:
        """Emit what a step added, or keep it until the end."""
        if seq.request.streamed:
            events.append(delta._replace(readouts=seq.readouts.take()) if seq.readouts else delta)
        else:
            seq.unsaid.append(delta)

    def _say_scores(self, seq: Sequence, events: list[Event]) -> bool:
        """Emit a prompt's logprobs once they are known; if they are not finite, end the sequence and return false."""
        scores, seq.scores = seq.scores, None
        if scores and not scores.finite:
            self._finish(seq, "error", events, NOT_FINITE)
            return False
        if scores:
            events.append(PromptLogprobs(seq.request.id, tuple(scores.logprobs)))
        return True

    def _accept(
        self,
        seq: Sequence,
        token: int,
        logprob: Logprob | None,
        layers: tuple[LayerTokens, ...] | None,
        events: list[Event],
    ) -> None:
        request = seq.request
        if not self._say_scores(seq, events):
            return None
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
        if seq.recording:
            self._ring.leave(seq.recording)
        if error == NOT_FINITE:
            self._memory.forget(seq.kv)
        self._scheduler.remove(seq)
        if seq.sampling_state.grammar_state:
            seq.sampling_state.grammar_state.close()
        captured, readouts = None, tuple[ReadoutRows, ...]()
        try:
            if seq.recording and reason in ("stop", "length"):
                captured = _with_columns(seq.recording.finish(seq.token_ids), seq.readouts)
        except Exception as failed:  # noqa: BLE001 - as above: the request still gets its last event
            error = _capture_failure(seq, failed)
        try:
            if seq.readouts and reason != "error":
                readouts = seq.readouts.take(ended=True)
        except Exception as failed:  # any error ends this request only
            logger.exception("request %s failed on its readouts", seq.request.id)
            captured, reason, error = None, "error", f"{type(failed).__name__}: {failed}"
        self._ended.append(seq.memory)
        if captured is not None:
            self._capture_budget.sent(seq, captured.bytes)
        self.statistics.cached_tokens += seq.cached
        end = Finished(
            seq.request.id,
            reason,
            seq.request.prompt,
            seq.tokens,
            captured,
            error,
            code,
            seq.memory,
            rest=Delta.of(seq.unsaid) if seq.unsaid else None,
            prompt_lens=tuple(seq.prompt_lens),
            readouts=readouts,
            stop_reason=seq.stop_reason,
            cached=seq.cached,
        )
        events.append(end)

    def _note_memory(self) -> None:
        """Measure the memory of running sequences and of those that have ended in this step.

        Reading a GPU's statistics takes 0.2 ms: it keeps its peak, and only a begin or an end reads it.
        """
        held, peak = device_memory.held_and_peak(self.model.device)
        for use in (*(seq.memory for seq in self._scheduler.running), *self._ended):
            use.before, use.peak = (use.before, max(use.peak, peak)) if use.before else (held, held)
        for use in self._ended:
            use.after = held
        self._ended.clear()

    def _note(self) -> None:
        if self._ended or self.model.device.type == "cpu":
            self._note_memory()
        numbers, scheduler = self.statistics, self._scheduler
        numbers.running = len(scheduler.running)
        numbers.waiting = len(scheduler.waiting)
        numbers.preempted = scheduler.preempted
        numbers.kv_bytes = self._memory.bytes
        numbers.kv_budget_bytes = self._memory.budget_bytes
        gathered = sum(seq.recording.bytes for seq in scheduler.recording if seq.recording)
        numbers.capture_bytes = gathered + self._capture_budget.bytes


def _is_own_assertion(error: Exception) -> bool:
    """Whether the engine itself, rather than a model's code, made a failed assertion."""
    if not isinstance(error, AssertionError):
        return False
    names = [str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(error.__traceback__)]
    return names[-1].startswith("deployments.")


def _with_columns(captured: Captured, readouts: SequenceReadouts | None) -> Captured:
    """Add the values of readouts at the same tokens to recorded rows."""
    if readouts is None or not captured.positions:
        return captured
    return captured._replace(values={**captured.values, **readouts.columns(captured.positions)})


def _capture_failure(seq: Sequence, error: Exception) -> str:
    """The reason why a sequence's rows cannot be returned."""
    if isinstance(error, (CaptureError, RuntimeError, MemoryError)):  # from torch: no memory for another dtype
        return str(error)
    logger.error("request %s failed on its rows", seq.request.id, exc_info=error)
    return f"{type(error).__name__}: {error}"
