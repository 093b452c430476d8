"""The engine: admit -> forward -> sample -> emit, for all requests at once.

One thread owns the model and calls `step` (or `run`, which does nothing else); any thread may `submit`,
`cancel` and report rows as `written`. Each step is one forward pass: one token of every request whose prompt has run,
and chunks of prompts. `output_processor.py` handles the result of a forward pass, and `recovery.py` a failed one.
"""

from __future__ import annotations

import functools
import itertools
import logging
import queue
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch

from deployments.engine.capture.buffer import CaptureBuffer, joined
from deployments.engine.capture.ring import CaptureRing, window_bytes
from deployments.engine.capture_budget import CaptureBudget
from deployments.engine.decoding.lens_reader import check_lens
from deployments.engine.decoding.prompt_logprobs import PromptScores
from deployments.engine.decoding.sampling import check_sampling
from deployments.engine.decoding.sampling_state import SamplingState
from deployments.engine.decoding.text import TextStream
from deployments.engine.kv_memory import KvMemory
from deployments.engine.output_processor import OutputProcessor
from deployments.engine.recovery import Recovery
from deployments.engine.request import Captured, Delta, Event, Finished, PromptLogprobs, Request
from deployments.engine.runner import Runner
from deployments.engine.scheduler import Chunk, Scheduler
from deployments.engine.sequence import Sequence as EngineSequence
from deployments.engine.statistics import Statistics
from deployments.errors import RequestError
from deployments.model import device_memory
from deployments.model.model import Model
from deployments.points.token_choices import resolve
from deployments.readouts.sequence import SequenceReadouts

MOST_BROKEN = 3  # consecutive failures of single requests by an assertion of the engine; the engine then ends

logger = logging.getLogger(__name__)


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
        self._inbox: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()  # calls for the model's thread
        self._arrivals = itertools.count()
        self._idle = True
        self._stopping = False
        compiled = functools.partial(self._inbox.put, self._settle)
        self._output = OutputProcessor(
            self._scheduler, self._memory, self._ring, self._capture_budget, self.statistics, compiled
        )
        self._recovery = Recovery(self._scheduler, self._memory, self._ring, self.statistics, self._output)
        self._broken = 0  # consecutive forward passes of a single request that failed by an assertion of the engine

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
        self._inbox.put(functools.partial(self._admit, request))

    def has_begun(self, request_id: str) -> bool:
        """Whether a submitted request has left the queue."""
        return request_id not in self._queued

    def cancel(self, request_id: str) -> None:
        """End a request at once; its last event has the reason "cancelled". Unknown ids are ignored."""
        self._inbox.put(functools.partial(self._cancel, request_id))

    def written(self, request_id: str, size: int) -> None:
        """Report that `size` bytes of a request's released rows no longer need memory."""
        self._inbox.put(functools.partial(self._written, request_id, size))

    def stop(self) -> None:
        """Make `run` return after its step."""
        self._stopping = True
        self._inbox.put(lambda: None)

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
                    self._receive()
        return [done[request.id] for request in requests]

    @torch.inference_mode()
    def step(self, wait: bool = False) -> list[Event]:
        """Receive messages, run one forward pass, and return its events.

        Args:
            wait: Wait for a message if there is nothing to do.
        """
        message = self._inbox.get() if wait and self._idle else None
        self.step_began = began = time.monotonic()
        events: list[Event] = []
        self._output.events = events
        if message:
            message()
        self._receive()
        chunks = self._scheduler.next_chunks()
        self._idle = not chunks
        tokens = self.statistics.tokens
        if chunks:
            self._queued.difference_update(chunk.sequence.request.id for chunk in chunks)
            self._capture_budget.divide(self._scheduler.recording)
            self._forward(chunks)
            self.statistics.count_step(time.monotonic() - began, self.statistics.tokens - tokens)
        self._note()
        self.step_began = None
        return events

    def _receive(self) -> None:
        """Do what other threads have asked for."""
        while not self._inbox.empty():
            self._inbox.get()()

    def _admit(self, request: Request) -> None:
        try:
            self._scheduler.waiting.append(self._sequence(request))
        except Exception as error:  # an error of the request, such as in its grammar, ends only this request
            logger.exception("request %s failed before its first forward pass", request.id)
            self._queued.discard(request.id)
            message = f"{type(error).__name__}: {error}"
            self._output.events.append(Finished(request.id, "error", request.prompt, error=message))

    def _written(self, request_id: str, size: int) -> None:
        self._capture_budget.written(request_id, size)
        self._settle()

    def _sequence(self, request: Request) -> EngineSequence:
        recording = readouts = None
        if request.capture:
            recording = CaptureBuffer(request.capture, request.points, len(request.prompt), request.max_tokens)
        if request.readouts:
            readouts = SequenceReadouts(request.readouts, len(request.prompt))
        before = request.prompt[-1] if request.continues else None
        text = TextStream(self.model.tokenizer, request.stop, request.markers, before)
        vocabulary = self.model.hf.get_output_embeddings().out_features
        sampling_state = SamplingState(request, self.model.eos, vocabulary)
        scores = PromptScores(request, vocabulary) if request.prompt_logprobs is not None else None
        arrival = next(self._arrivals)
        return EngineSequence(request, text, sampling_state, recording, arrival, scores, readouts=readouts)

    def _cancel(self, request_id: str) -> None:
        for seq in (*self._scheduler.waiting, *self._scheduler.running):
            if seq.request.id == request_id:
                self._queued.discard(request_id)
                self._output.finish(seq, "cancelled")
                return

    # ---- one forward pass

    def _forward(self, chunks: Sequence[Chunk]) -> None:
        """Run a forward pass and process its result; an error ends only the failing sequence."""
        device = self.model.device
        if not all(chunk.sequence.memory.before for chunk in chunks):
            self._note_memory()
        failed = out_of_memory = None
        try:
            self._output.advance(self._runner.run(chunks))
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
            self._recovery.recover(chunks, failed, out_of_memory)
        self._output.send_rows()
        self._settle()

    def _settle(self) -> None:
        """Pause sequences that hold too many recorded bytes, or whose grammar is being compiled again."""
        share = self._capture_budget.share(self._scheduler.recording)
        for seq in self._scheduler.running:
            grammar_state = seq.sampling_state.grammar_state
            compiles = grammar_state is not None and grammar_state.compiles
            seq.stalled = compiles or self._capture_budget.stalls(seq, share)
            if seq.stalled and seq.recording:
                self._ring.leave(seq.recording)

    def _note_memory(self) -> None:
        """Measure the memory of running sequences and of those that have ended in this step.

        Reading a GPU's statistics takes 0.2 ms: it keeps its peak, and only a begin or an end reads it.
        """
        held, peak = device_memory.held_and_peak(self.model.device)
        for use in (*(seq.memory for seq in self._scheduler.running), *self._output.ended):
            use.before, use.peak = (use.before, max(use.peak, peak)) if use.before else (held, held)
        for use in self._output.ended:
            use.after = held
        self._output.ended.clear()

    def _note(self) -> None:
        if self._output.ended or self.model.device.type == "cpu":
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
