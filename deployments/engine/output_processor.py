"""From the result of a forward pass to events: next tokens are drawn, texts and rows emitted, sequences ended."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import torch

from deployments.engine.capture.buffer import CaptureError
from deployments.engine.capture.ring import CaptureRing
from deployments.engine.capture_budget import CaptureBudget
from deployments.engine.decoding.sampling import NO_TOKEN_LEFT, NOT_FINITE, Choice, ChosenTokens, choose, launch
from deployments.engine.kv_memory import KvMemory
from deployments.engine.request import (
    GRAMMAR_TOO_COMPLEX,
    Captured,
    Delta,
    Event,
    Finished,
    FinishReason,
    LayerTokens,
    Logprob,
    MemoryUse,
    PromptLogprobs,
    Rows,
    StopReason,
)
from deployments.engine.runner import ForwardResult
from deployments.engine.scheduler import Scheduler
from deployments.engine.sequence import Sequence
from deployments.engine.statistics import Statistics
from deployments.model import device_memory
from deployments.readouts.spec import ReadoutRows

logger = logging.getLogger(__name__)


class OutputProcessor:
    """Processes the results of forward passes; an error ends only the sequence that it belongs to.

    Attributes:
        events: The events of the engine's current step.
        ended: The memory use of sequences that have ended; the engine completes and removes it.
        ending: The number of sequences that have ended and whose last event waits for their rows.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        memory: KvMemory,
        ring: CaptureRing,
        capture_budget: CaptureBudget,
        statistics: Statistics,
        compiled: Callable[[], None],
    ) -> None:
        """Initialize without events.

        Another thread calls `compiled` when a grammar that a sequence waits for has been compiled.
        """
        self.events: list[Event] = []
        self.ended: list[MemoryUse] = []
        self.ending = 0
        self._scheduler = scheduler
        self._memory = memory
        self._ring = ring
        self._capture_budget = capture_budget
        self._statistics = statistics
        self._compiled = compiled

    @staticmethod
    def may_run_ahead(seq: Sequence) -> bool:
        """Whether to launch a sequence's next forward pass before its next token is known on the host.

        The host waits for the values of a lens, of readouts and of monitors that may end the answer in each step, and
        so would wait for the next one. Recorded rows could leave before the values of monitors that ran ahead. Which
        part of the answer a token is must be known before its row is computed.
        """
        watched = seq.watch and (seq.watch.set.stops or seq.recording)
        waits = seq.reads or watched or seq.request.lens or seq.request.parts is not None
        return not (seq.ending or waits or seq.sampling_state.needs_last)

    @staticmethod
    def choose(seqs: list[Sequence], logits: torch.Tensor, ahead: int = 0) -> Choice:
        """Choose the next tokens of sequences on the device, or with `ahead` 1 those after tokens not known yet."""
        return launch(logits, [seq.sampling_state for seq in seqs], ahead, width=logits.shape[-1])

    def advance(self, outcome: ForwardResult, chosen: ChosenTokens | None = None) -> None:
        """Draw each sequence's next token unless it is chosen already, and finish the sequences that end."""
        seqs, logits, lens, stopped = outcome
        if not seqs:
            return
        ended = {i for i, seq in enumerate(seqs) if seq.ending or (i in stopped and seq.may_stop(stopped[i]))}
        waiting = {i for i, seq in enumerate(seqs) if i not in ended and not self._may_draw(seq)}
        undrawn = ended | waiting
        if chosen is None:
            chosen = choose(logits, [None if i in undrawn else seq.sampling_state for i, seq in enumerate(seqs)])
        for i, seq in enumerate(seqs):
            if seq.done:
                continue
            try:
                if seq.ending:  # its text is complete; this forward pass was for its last row
                    self.finish(seq, seq.ending)
                elif i in ended:
                    self._stop(seq, stopped[i])
                elif i in chosen.failed:
                    own = chosen.failed[i] in (NOT_FINITE, NO_TOKEN_LEFT)
                    self.finish(seq, "error", chosen.failed[i], "engine_error" if own else GRAMMAR_TOO_COMPLEX)
                elif i in waiting:
                    seq.fed -= 1  # its last token runs again once its grammar is ready
                else:
                    self._accept(seq, chosen.tokens[i], chosen.logprobs.get(i), lens.get(i))
            except Exception as error:
                if device_memory.is_broken(error):
                    raise
                # The tokenizer or a grammar failed on this sequence's token: the other sequences continue.
                logger.exception("request %s failed on its token", seq.request.id)
                self.finish(seq, "error", f"{type(error).__name__}: {error}")

    def send_rows(self) -> None:
        """Release the recorded rows of sequences that have gathered a chunk of them."""
        seqs = self._scheduler.recording
        self._capture_budget.divide(seqs)
        for seq in seqs:
            assert seq.recording is not None
            if seq.recording.full and not seq.recording.leaving:
                seq.recording.leaving = True
                self._ring.worker.run(partial(seq.recording.flush, seq.token_ids), partial(self._emit_rows, seq))

    def _emit_rows(self, seq: Sequence, flushed: Callable[[], Captured | None]) -> None:
        """Emit rows that have left a sequence's buffer; none if it has stopped recording."""
        assert seq.recording is not None
        seq.recording.leaving = False
        try:
            if (captured := flushed()) is not None:
                captured = _with_columns(captured, seq)
        except Exception as error:  # noqa: BLE001 - any error ends only this request's recording
            seq.recording.failed = _capture_failure(seq, error)  # at once: the job that finishes it may come first
            self._ring.worker.run(partial(seq.recording.give_up, seq.recording.failed))
        else:
            if captured is not None:
                self._capture_budget.sent(seq, captured.bytes)
                self.events.append(Rows(seq.request.id, captured))

    def finish(self, seq: Sequence, reason: FinishReason, error: str | None = None, code: str = "engine_error") -> None:
        """End a running or waiting sequence and free its memory; its last event follows when its rows are there."""
        recording, complete = seq.recording, reason in ("stop", "length")
        if recording:
            self._ring.leave(recording, seq.length)
            if complete:
                self._ring.send([recording])
        if error == NOT_FINITE:
            self._memory.forget(seq.kv)
        self._scheduler.remove(seq)
        seq.done = True
        if seq.sampling_state.grammar_state:
            seq.sampling_state.grammar_state.close()
        self.ended.append(seq.memory)
        self._statistics.cached_tokens += seq.cached
        self.ending += 1
        end = partial(self._emit_end, seq, reason, error, code)
        if recording:
            job: Callable[[], Captured | None] = partial(recording.give_up, reason)
            self._ring.worker.run(partial(recording.finish, seq.token_ids) if complete else job, end)
        else:
            end(lambda: None)

    def _emit_end(
        self, seq: Sequence, reason: FinishReason, error: str | None, code: str, rows: Callable[[], Captured | None]
    ) -> None:
        """Emit a sequence's last event with its remaining rows."""
        self.ending -= 1
        captured, readouts = None, tuple[ReadoutRows, ...]()
        try:
            if (captured := rows()) is not None:
                if seq.recording and seq.recording.failed:
                    raise CaptureError(seq.recording.failed)
                captured = _with_columns(captured, seq)
        except Exception as failed:  # noqa: BLE001 - as above: the request still gets its last event
            captured, error = None, _capture_failure(seq, failed)
        try:
            if seq.readouts and reason != "error":
                readouts = seq.readouts.take(ended=True)
        except Exception as failed:  # any error ends this request only
            logger.exception("request %s failed on its readouts", seq.request.id)
            captured, reason, error = None, "error", f"{type(failed).__name__}: {failed}"
        if captured is not None:
            self._capture_budget.sent(seq, captured.bytes)
        self.events.append(
            Finished(
                seq.request.id,
                reason,
                seq.request.prompt,
                seq.tokens,
                captured,
                error,
                code,
                seq.memory,
                rest=Delta.of(seq.unsent) if seq.unsent else None,
                prompt_lens=tuple(seq.prompt_lens),
                readouts=readouts,
                stop_reason=seq.stop_reason,
                cached=seq.cached,
                monitored=seq.watch.results() if seq.watch else (),
            )
        )

    def _may_draw(self, seq: Sequence) -> bool:
        """Whether a sequence's next token can be drawn now; otherwise another thread compiles its grammar first."""
        grammar_state = seq.sampling_state.grammar_state
        return grammar_state is None or grammar_state.ready(self._compiled)

    def _stop(self, seq: Sequence, reason: StopReason) -> None:
        """End an answer at a row that met its `stop_when` or a monitor; that row's token was sent already."""
        if not self._emit_scores(seq):
            return
        seq.stop_reason = reason
        if text := seq.text.close(seq.tokens):
            self._emit(seq, Delta(seq.request.id, (), text))
        self.finish(seq, "stop")

    def _emit(self, seq: Sequence, delta: Delta) -> None:
        """Emit what a step added, or keep it until the end."""
        if seq.request.streamed:
            self.events.append(delta._replace(readouts=seq.readouts.take()) if seq.readouts else delta)
        else:
            seq.unsent.append(delta)

    def _emit_scores(self, seq: Sequence) -> bool:
        """Emit a prompt's logprobs once they are known; if they are not finite, end the sequence and return false."""
        scores, seq.scores = seq.scores, None
        if scores and not scores.finite:
            self.finish(seq, "error", NOT_FINITE)
            return False
        if scores:
            self.events.append(PromptLogprobs(seq.request.id, tuple(scores.logprobs)))
        return True

    def _accept(
        self, seq: Sequence, token: int, logprob: Logprob | None, layers: tuple[LayerTokens, ...] | None
    ) -> None:
        """Append a sequence's next token, and end the sequence if the token or the text up to it does."""
        request = seq.request
        if seq.scores and not self._emit_scores(seq):
            return
        if request.max_tokens == 0:
            self.finish(seq, "length")
            return
        seq.add(token)
        if request.parts is not None:
            request.parts.add(token)
        self._statistics.tokens += 1
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
        self._emit(seq, Delta(request.id, (token,), text, logprobs, lens))
        if seq.ending and not seq.wants_last:
            self.finish(seq, seq.ending)


def _with_columns(captured: Captured, seq: Sequence) -> Captured:
    """Add the values of readouts at the same tokens to recorded rows, and to those that are stored the monitors'."""
    if not captured.positions:
        return captured
    columns = seq.readouts.columns(captured.positions) if seq.readouts else {}
    if seq.watch and seq.request.capture and seq.request.capture.destination != "inline":
        columns |= seq.watch.columns(captured.positions)
    return captured._replace(values={**captured.values, **columns})


def _capture_failure(seq: Sequence, error: Exception) -> str:
    """The reason why a sequence's rows cannot be returned."""
    if isinstance(error, (CaptureError, RuntimeError, MemoryError)):  # from torch: no memory for another dtype
        return str(error)
    logger.error("request %s failed on its rows", seq.request.id, exc_info=error)
    return f"{type(error).__name__}: {error}"
