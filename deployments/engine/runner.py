"""One forward pass: chunks of prompts and the next token of every decoding sequence, packed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from deployments.engine.capture.forward_capture import ForwardCapture
from deployments.engine.capture.ring import CaptureRing
from deployments.engine.decode_steps import DecodeSteps
from deployments.engine.decoding.lens_reader import LensReader, LensRow
from deployments.engine.edit_plans import Effects, Plans
from deployments.engine.kv_memory import KvMemory
from deployments.engine.monitors import MonitorReader
from deployments.engine.request import LayerTokens, StopReason
from deployments.engine.scheduler import Chunk
from deployments.engine.sequence import Sequence as EngineSequence
from deployments.model.batch import PAGE, Batch, TokenSpan
from deployments.model.model import Model
from deployments.places.hook_site import HookSite
from deployments.readouts.reading import ReadoutReader, ReadSpan, Stacks


class ForwardResult(NamedTuple):
    """The result of a forward pass.

    Attributes:
        sequences: Those whose next token it predicts; a sequence whose prompt is incomplete is left out.
        logits: [sequences, vocabulary].
        lens: Index in `sequences` -> the result of each layer, for sequences with a lens.
        stopped: Index in `sequences` -> the row that ends its answer, for sequences that `stop_when` or a monitor ends.
    """

    sequences: list[EngineSequence]
    logits: torch.Tensor
    lens: Mapping[int, tuple[LayerTokens, ...]]
    stopped: Mapping[int, StopReason]


@dataclass
class Launched:
    """A forward pass whose results are on the device, and not read yet.

    Attributes:
        chunks: What runs, in the order of its rows.
        sequences: Those whose next token it predicts; a sequence whose prompt is incomplete is left out.
        logits: [sequences, vocabulary]; another forward pass may overwrite them.
        fixed: Whether it is a decode step with memory at fixed addresses.
        commit: Updates sequences and recordings; returns the result.
    """

    chunks: Sequence[Chunk]
    sequences: list[EngineSequence]
    logits: torch.Tensor
    fixed: bool
    commit: Callable[[], ForwardResult]


class Runner:
    """Runs sequences through the model. A failed launch leaves sequences and recordings unchanged."""

    def __init__(self, model: Model, memory: KvMemory, ring: CaptureRing, steps: DecodeSteps | None) -> None:
        """Initialize a runner; `steps` runs decode steps with memory at fixed addresses, if they are to run so."""
        self._model = model
        self._memory = memory
        self._ring = ring
        self._steps = steps
        self._plans = Plans()
        self._lenses = LensReader([])  # of the last forward pass
        self._stacks = Stacks()

    def launch(self, chunks: Sequence[Chunk], tokens: torch.Tensor | None = None) -> Launched:
        """Run one forward pass on the device.

        Args:
            chunks: The chunks to run; their pages are reserved.
            tokens: [chunks] ids that are known on the device alone; the chunks are then in the order of the forward
                pass that predicted them, which is not committed yet.
        """
        chunks = self._in_order(chunks) if tokens is None else chunks
        deciding = [chunk for chunk in chunks if chunk.decides]
        drawn = {
            turn: LensRow(_last_row(chunk), asked)
            for turn, chunk in enumerate(deciding)
            if chunk.sequence.request.lens and (asked := chunk.sequence.lens)
        }
        prompts = [
            (chunk.sequence, position, LensRow(chunk.row + position - chunk.start, asked))
            for chunk in chunks
            if (asked := chunk.sequence.request.lens)
            for position in chunk.sequence.lensed(chunk.start, chunk.start + chunk.count)
        ]
        asking = [*drawn.values(), *(row for _, _, row in prompts)]
        if asking != self._lenses.asking:  # the last reader is reused while the same rows have a lens
            self._lenses = LensReader(asking)
        lenses = self._lenses
        lenses.begin()
        capture = ForwardCapture(self._ring, chunks)
        readouts = ReadoutReader([_read_span(chunk) for chunk in chunks if chunk.sequence.reads], self._stacks)
        monitors = MonitorReader(
            (watch, chunk.start, chunk.row, chunk.count) for chunk in chunks if (watch := chunk.sequence.watch)
        )
        readers = lenses, readouts, monitors
        places = list(dict.fromkeys(place for reader in (capture, *readers) for place in reader.places))
        scored = [
            (scores, range(chunk.row + unscored.start, chunk.row + unscored.stop))
            for chunk in chunks
            if (scores := chunk.sequence.scores) and (unscored := scores.wanted(chunk.start, chunk.count))
        ]

        ids = [0] * len(chunks) if tokens is not None else [token for chunk in chunks for token in _tokens(chunk)]
        spans = [TokenSpan(chunk.sequence.kv, chunk.start, chunk.count) for chunk in chunks]
        for chunk in chunks if self._model.has_states else ():
            assert chunk.sequence.kv.state_at == chunk.start, "its states are those of its last token"
            chunk.sequence.kv.state_at = -1
        steps = self._steps
        decodes = steps and (tokens is not None or all(chunk.sequence.decodes for chunk in chunks))
        step = steps.find(chunks, places) if steps and decodes else None
        effects: Effects | None = None
        if steps and step:
            logits, effects = steps.run(step, chunks, ids, spans, tokens)
            values = {place: steps.stage[place][: len(chunks)] for place in places if place in step.came}
            capture.take_staged(values)
            for place, value in values.items():
                for reader in readers:
                    reader.take(place, value)
        else:
            assert tokens is None, "only decode steps run ahead"
            wanted = [_last_row(chunk) for chunk in deciding] + [row for _, rows in scored for row in rows]
            batch = Batch(ids, spans, None if len(deciding) == len(ids) else wanted, self._model.device)
            logits = self._eager(chunks, batch, places, capture, readers)

        for chunk in chunks if self._model.has_states else ():
            chunk.sequence.kv.state_at = chunk.start + chunk.count
        parts = torch.split(logits[len(deciding) :], [len(rows) for _, rows in scored]) if scored else ()
        logprobs = [scores.read(part) for (scores, _), part in zip(scored, parts, strict=True)]
        layers = lenses.read(self._model.unembedding)  # before any state changes: these may run out of memory
        monitors.send()
        capture.send()
        capture.keep()
        sequences, logits = [chunk.sequence for chunk in deciding], logits[: len(deciding)]

        def commit() -> ForwardResult:
            met = readouts.keep()
            monitors.keep()
            stopped = dict[int, StopReason]()
            for turn, chunk in enumerate(deciding):
                if (watch := chunk.sequence.watch) and watch.stop:
                    stopped[turn] = watch.stop
                elif (row := _last_row(chunk)) in met:
                    stopped[turn] = StopReason(*met[row])
            if effects:
                effects.keep({chunk.row for chunk in chunks if not chunk.sequence.done})
            for (scores, _), new in zip(scored, logprobs, strict=True):
                scores.add(new)
            for (seq, position, _), of_prompt in zip(prompts, layers[len(drawn) :], strict=True):
                seq.prompt_lens.append((position, of_prompt))
            for chunk in chunks:
                if not chunk.sequence.done:
                    self._fed(chunk)
            return ForwardResult(sequences, logits, lens_of, stopped)

        lens_of = dict(zip(drawn, layers, strict=False))
        return Launched(chunks, sequences, logits, step is not None, commit)

    def _eager(
        self,
        chunks: Sequence[Chunk],
        batch: Batch,
        places: Sequence[HookSite],
        capture: ForwardCapture,
        readers: tuple[LensReader, ReadoutReader, MonitorReader],
    ) -> torch.Tensor:
        """[wanted, vocabulary] logits of a forward pass of any chunks; hooks read and change its values."""
        plan = self._plans.of(chunks)

        def visit(place: HookSite, value: Any) -> torch.Tensor | None:
            new = plan.apply(place, value, readers[1])
            seen = value if new is None else new
            for reader in (capture, *readers):
                reader.take(place, seen)
            return new

        places = [*places, *plan.places]
        every_logit = any(place.module == self._model.head for place in places)
        return self._model.forward(batch, self._memory.cache, places, visit, every_logit, capture.readers)

    def _in_order(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """The chunks with their rows: first those whose row goes through the ring, in its order."""
        ordered = list(chunks)
        if self._model.packs and (self._ring.recordings or any(chunk.sequence.recording for chunk in chunks)):
            decoding = {
                recording: chunk
                for chunk in chunks
                if (recording := chunk.sequence.recording) and chunk.sequence.decodes and recording.wants_generated
            }
            ordered = [decoding[recording] for recording in self._ring.arrange(list(decoding))]
            ordered += [chunk for chunk in chunks if chunk.sequence.recording not in decoding]
        row = 0
        for chunk in ordered:
            chunk.row = row
            row += chunk.count
        return ordered

    def _fed(self, chunk: Chunk) -> None:
        """Update the sequence of a chunk whose forward pass succeeded."""
        seq = chunk.sequence
        before, seq.fed = seq.fed, chunk.start + chunk.count
        if seq.recording:
            seq.recording.rows = max(seq.recording.rows, seq.fed)
        if (
            self._model.packs and not self._model.has_states and seq.fed // PAGE > before // PAGE
        ):  # it has filled a page
            self._memory.remember(seq.kv, seq.token_ids, min(seq.fed, seq.unchanged))


def _read_span(chunk: Chunk) -> ReadSpan:
    seq, request = chunk.sequence, chunk.sequence.request
    return ReadSpan(seq.readouts, request.gates, request.stop_when, chunk.start, chunk.count, chunk.row, chunk.decides)


def _last_row(chunk: Chunk) -> int:
    return chunk.row + chunk.count - 1


def _tokens(chunk: Chunk) -> Sequence[int]:
    seq, stop = chunk.sequence, chunk.start + chunk.count
    prompt = len(seq.request.prompt)
    if stop <= prompt:
        return seq.request.prompt[chunk.start : stop]
    if chunk.start >= prompt:
        return seq.tokens[chunk.start - prompt : stop - prompt]
    return [*seq.request.prompt[chunk.start :], *seq.tokens[: stop - prompt]]
