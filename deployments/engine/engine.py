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
from concurrent.futures import Future
from dataclasses import replace
from typing import TypeVar

import torch

from deployments.engine.capture.buffer import CaptureBuffer, joined
from deployments.engine.capture.ring import CaptureRing, window_bytes
from deployments.engine.capture.worker import Worker
from deployments.engine.capture_budget import CaptureBudget
from deployments.engine.decode_steps import DecodeSteps
from deployments.engine.decoding.lens_reader import check_lens
from deployments.engine.decoding.prompt_logprobs import PromptScores
from deployments.engine.decoding.sampling import Choice, check_sampling
from deployments.engine.decoding.sampling_state import SamplingState
from deployments.engine.decoding.text import TextStream
from deployments.engine.kv_memory import KvMemory
from deployments.engine.output_processor import OutputProcessor
from deployments.engine.recovery import Recovery
from deployments.engine.request import Captured, Event, Finished, Request, Rows
from deployments.engine.runner import Launched, Runner
from deployments.engine.scheduler import Chunk, Scheduler
from deployments.engine.sequence import Sequence as EngineSequence
from deployments.engine.statistics import Statistics
from deployments.errors import RequestError
from deployments.model import device_memory
from deployments.model.model import Model
from deployments.points.token_choices import resolve
from deployments.readouts.sequence import SequenceReadouts

MOST_BROKEN = 3  # consecutive failures of single requests by an assertion of the engine; the engine then ends
MOST_AHEAD = 8  # forward passes launched ahead in a row while requests wait, which may fit by now

logger = logging.getLogger(__name__)
_T = TypeVar("_T")


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
        cuda_graphs: bool = True,
        fixed_memory: bool | None = None,
        capture_thread: bool = False,
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
            cuda_graphs: Whether a GPU runs decode steps as CUDA graphs.
            fixed_memory: Whether decode steps use memory at fixed addresses and the next one is launched before the
                tokens of the last are known, as with CUDA graphs; by default only with them.
            capture_thread: Bring recorded rows to their buffers on another thread, as always on a GPU.
        """
        self.model = model
        self.step_began: float | None = None  # monotonic seconds; None between steps
        self._queued = set[str]()  # requests that have not run yet
        self._memory = KvMemory(model, max_running, kv_bytes, kv_fraction)
        self.statistics = Statistics(kv_budget_bytes=self._memory.budget_bytes)
        self._inbox: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()  # calls for the model's thread
        self._worker = Worker(self._inbox.put, capture_thread or model.device.type == "cuda")
        self._ring = CaptureRing(model.device, window_bytes(model.device, capture_bytes), self._worker)
        graphs = cuda_graphs and model.device.type == "cuda" and not getattr(model.hf, "hf_device_map", None)
        fixed = model.packs and (graphs if fixed_memory is None else fixed_memory)
        steps = DecodeSteps(model, self._memory, max_running, graphs) if fixed else None
        self._runner = Runner(model, self._memory, self._ring, steps)
        self._flying: tuple[Launched, Choice] | None = None  # launched ahead: neither result nor tokens are read yet
        self._ahead = 0  # forward passes launched ahead in a row
        self._left = 0  # requests that still waited when the scheduler looked last
        self._capture_budget = budget = CaptureBudget(capture_bytes)
        prefill_tokens = prefill_tokens or (1024 if model.device.type == "cpu" else 4096)
        kind = model.packs, model.has_states, model.mixers.stepwise
        self._scheduler = Scheduler(self._memory, max_running, prefill_tokens, budget, *kind)
        self._arrivals = itertools.count()
        self._idle = True
        self._stopping = False
        compiled = functools.partial(self._inbox.put, self._settle)
        self._output = OutputProcessor(self._scheduler, self._memory, self._ring, budget, self.statistics, compiled)
        self._recovery = Recovery(self._scheduler, self._memory, self._ring, self.statistics, self._output)
        self._peak = 0  # on a CPU: the most memory held after a step since it was last noted
        self._broken = 0  # consecutive forward passes of a single request that failed by an assertion of the engine

    # ---- for any thread

    def check(self, request: Request) -> None:
        """Reject a request that can never run.

        Raises:
            RequestError: An empty prompt, more tokens than the context or the KV memory holds, or settings
                that this model or the request's length does not support.
        """
        prompt, context = len(request.prompt), self.model.context
        most = prompt + request.max_tokens
        if not prompt:
            raise RequestError("the prompt has no tokens", "prompt")
        if request.max_tokens < 0:
            raise RequestError("max_tokens must be at least 0", "max_tokens")
        if min(request.prompt) < 0 or max(request.prompt) >= self.model.vocabulary:
            raise RequestError(f"token ids go from 0 to {self.model.vocabulary - 1}", "prompt")
        if most > context:
            field = "prompt" if prompt + min(request.max_tokens, 1) > context else "max_tokens"
            message = (
                f"{prompt} prompt tokens and {request.max_tokens} new ones exceed the model's context of {context}"
            )
            raise RequestError(message, field, "context_length_exceeded")
        if most > self._memory.longest:
            needed = self._memory.most_held(most) * self._memory.position_bytes + self._memory.slot_bytes
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

    @property
    def has_requests(self) -> bool:
        """Whether requests wait or run."""
        return bool(self._queued or self.statistics.running)

    def cancel(self, request_id: str) -> None:
        """End a request at once; its last event has the reason "cancelled". Unknown ids are ignored."""
        self._inbox.put(functools.partial(self._cancel, request_id))

    def call(self, work: Callable[[], _T]) -> Future[_T]:
        """Call a function on the model's thread, between two forward passes of requests."""
        result = Future[_T]()

        def run() -> None:
            if result.set_running_or_notify_cancel():
                try:
                    result.set_result(work())
                except Exception as error:  # noqa: BLE001 - the future raises it
                    result.set_exception(error)

        self._inbox.put(run)
        return result

    def written(self, request_id: str, size: int) -> None:
        """Report that `size` bytes of a request's released rows no longer need memory."""
        self._inbox.put(functools.partial(self._capture_budget.written, request_id, size))
        self._inbox.put(self._settle)

    def stop(self) -> None:
        """Make `run` return after its step."""
        self._stopping = True
        self._inbox.put(lambda: None)

    # ---- for the thread that owns the model

    def run(self, emit: Callable[[list[Event]], None]) -> None:
        """Call `step` until stopped, and pass each step's events on; wait when there is nothing to do."""
        while not self._stopping:
            if events := self.step(wait=True):
                emit(events)

    def generate(self, requests: Iterable[Request]) -> list[Finished]:
        """Run requests together to their end and return their last events, in order, with all recorded rows.

        Raises:
            RequestError: One of them can never run, or two have the same id.
            RuntimeError: Other requests are running, whose events would be lost.
        """
        requests = list(requests)
        chunks: dict[str, list[Captured]] = {request.id: [] for request in requests}
        if len(chunks) < len(requests):
            raise RequestError("two requests have the same id", "id")
        for request in requests:
            self.check(request)
        for request in requests:
            self.submit(replace(request, streamed=False))
        done: dict[str, Finished] = {}
        try:
            while len(done) < len(requests):
                for event in self.step(wait=True):
                    if event.id not in chunks:
                        raise RuntimeError(f"request {event.id!r} is under way: take its events from `step` first")
                    if isinstance(event, (Rows, Finished)) and event.captured is not None:
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
                    self._worker.finish()
                    self._receive()
        return [done[request.id] for request in requests]

    @torch.inference_mode()
    def step(self, wait: bool = False) -> list[Event]:
        """Receive messages, process the result of one forward pass, and return its events; if idle, `wait` first."""
        self._output.events = events = list[Event]()
        if wait and self._idle:
            self._inbox.get()()
        self.step_began = began = time.monotonic()
        self._receive()
        tokens = self.statistics.tokens
        self._forward()
        if not self._idle:
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
            self._scheduler.add(self._sequence(request))
        except Exception as error:  # an error of the request, such as in its grammar, ends only this request
            logger.exception("request %s failed before its first forward pass", request.id)
            self._queued.discard(request.id)
            message = f"{type(error).__name__}: {error}"
            self._output.events.append(Finished(request.id, "error", request.prompt, error=message))

    def _sequence(self, request: Request) -> EngineSequence:
        capture, prompt = request.capture, len(request.prompt)
        recording = CaptureBuffer(capture, request.points, prompt, request.max_tokens) if capture else None
        readouts = SequenceReadouts(request.readouts, prompt) if request.readouts else None
        before = request.prompt[-1] if request.continues else None
        text = TextStream(self.model.tokenizer, request.stop, request.markers, before)
        vocabulary = self.model.hf.get_output_embeddings().out_features
        state = SamplingState(request, self.model.eos, vocabulary)
        scores = PromptScores(request, vocabulary) if request.prompt_logprobs is not None else None
        mixers = self.model.mixers
        inside = bool(mixers.paths) and any(mixers.contain(place.module) for place in request.places)
        return EngineSequence(request, text, state, recording, next(self._arrivals), inside, scores, readouts=readouts)

    def _cancel(self, request_id: str) -> None:
        for seq in (*self._scheduler.waiting, *self._scheduler.running):
            if seq.request.id == request_id:
                self._queued.discard(request_id)
                self._output.finish(seq, "cancelled")

    # ---- one forward pass

    def _forward(self) -> None:
        """Process the result of a forward pass; an error ends only the failing sequence."""
        if self._flying and all(seq.done for seq in self._flying[0].sequences):
            self._flying = None  # nobody needs its result
        if not (chunks := self._flying[0].chunks if self._flying else self._next_chunks()):
            return
        failed = out_of_memory = None
        try:
            self._advance(chunks)
            self._scheduler.went_well()
            self._broken = 0
        except Exception as error:  # by a request, the model's code or the device; only the requests selected below end
            self._broken += len(chunks) == 1 and _is_own_assertion(error)
            if self._broken == MOST_BROKEN or device_memory.is_broken(error):
                raise
            logger.exception("a forward of %d requests failed", len(chunks))
            failed = f"{type(error).__name__}: {error}"
            if device_memory.is_out_of_memory(error):
                out_of_memory = device_memory.describe(self.model.device, error)
        if failed:  # outside the handler, whose error keeps the forward pass's tensors alive
            self._recovery.recover(chunks, failed, out_of_memory)
        self._output.send_rows()
        self._settle()

    def _advance(self, chunks: Sequence[Chunk]) -> None:
        """Process the result of a forward pass, after launching the next one if that is possible."""
        launched, choice = self._flying or (self._runner.launch(chunks), None)
        self._flying = None
        ahead = self._may_run_ahead(launched)
        if choice is None:
            if not ahead:
                self._output.advance(launched.commit())
                return
            choice = self._output.choose(launched.sequences, launched.logits)
        following = self._launched_after(launched, choice) if ahead else None
        try:
            chosen, outcome = choice.read(), launched.commit()
        except Exception:
            if following:  # this one runs again, and then the next one
                self._ring.undo()
            raise
        self._output.advance(outcome, chosen)
        self._flying = following

    def _next_chunks(self) -> Sequence[Chunk]:
        """What the next forward pass runs; nothing if the engine is idle."""
        chunks = self._scheduler.next_chunks()
        self._left = len(self._scheduler.waiting)
        self._idle = not chunks
        if chunks:
            if self._queued:
                self._queued.difference_update(chunk.sequence.request.id for chunk in chunks)
            self._capture_budget.divide(self._scheduler.recording)
            if not all(chunk.sequence.memory.before for chunk in chunks):
                self._note_memory()
        return chunks

    def _may_run_ahead(self, launched: Launched) -> bool:
        """Whether the next forward pass can be launched before the result of this one is known."""
        waiting = len(self._scheduler.waiting)
        may = launched.fixed and self._inbox.empty() and waiting <= self._left
        may = may and (self._ahead < MOST_AHEAD or not waiting)
        may = may and all(self._output.may_run_ahead(seq) for seq in launched.sequences)
        may = may and self._scheduler.may_run_ahead(launched.chunks)  # takes pages, so it comes last
        self._ahead = self._ahead + 1 if may else 0
        return may

    def _launched_after(self, before: Launched, choice: Choice) -> tuple[Launched, Choice] | None:
        """The next forward pass of the same sequences, launched with tokens that only the device knows yet."""
        launched = None
        try:
            chunks = [Chunk(chunk.sequence, chunk.start + 1, 1, chunk.row) for chunk in before.chunks]
            launched = self._runner.launch(chunks, choice.tokens)
            return launched, self._output.choose(launched.sequences, launched.logits, ahead=1)
        except Exception as error:  # the same forward pass runs again after this one's result, and then says so
            if device_memory.is_broken(error):
                raise
            logger.info("a forward pass could not be launched ahead", exc_info=True)
            if launched:
                self._ring.undo()
            return None

    def _settle(self) -> None:
        """Pause sequences that hold too many recorded bytes, or whose grammar is being compiled again."""
        share = self._capture_budget.share(self._scheduler.recording)
        for seq in self._scheduler.running:
            grammar_state = seq.sampling_state.grammar_state
            if grammar_state is None and seq.recording is None:
                continue
            compiles = grammar_state is not None and grammar_state.compiles
            seq.stalled = compiles or self._capture_budget.stalls(seq, share)
            if seq.stalled and seq.recording:
                self._ring.leave(seq.recording)

    def _note_memory(self) -> None:
        """Measure the memory of running sequences and of those that have ended in this step."""
        # A GPU keeps its peak; reading it takes 0.2 ms, so only a begin or an end of a sequence does.
        held, peak = device_memory.held_and_peak(self.model.device)
        peak, self._peak = max(peak, self._peak), 0
        for use in (*(seq.memory for seq in self._scheduler.running), *self._output.ended):
            use.before, use.peak = (use.before, max(use.peak, peak)) if use.before else (held, held)
        for use in self._output.ended:
            use.after = held
        self._output.ended.clear()

    def _note(self) -> None:
        if self._output.ended:
            self._note_memory()
        elif self.model.device.type == "cpu":
            self._peak = max(self._peak, device_memory.held_bytes(self.model.device))
        numbers, scheduler = self.statistics, self._scheduler
        numbers.running = len(scheduler.running) + self._output.ending
        numbers.waiting = len(scheduler.waiting)
        numbers.preempted = scheduler.preempted
        numbers.kv_bytes = self._memory.bytes
        gathered = sum(seq.recording.bytes for seq in scheduler.recording if seq.recording)
        numbers.capture_bytes = gathered + self._capture_budget.bytes


def _is_own_assertion(error: Exception) -> bool:
    """Whether the engine itself, rather than a model's code, made a failed assertion."""
    names = [str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(error.__traceback__)]
    return isinstance(error, AssertionError) and names[-1].startswith("deployments.")
