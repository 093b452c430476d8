"""One forward pass: chunks of prompts and the next token of every decoding sequence, packed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from deployments.engine.capture.ring import CaptureRing, PromptRows, gatherings, places_of
from deployments.engine.decoding.lens_reader import LensReader, LensRow
from deployments.engine.edit_plans import Plans
from deployments.engine.kv_memory import KvMemory
from deployments.engine.request import LayerTokens
from deployments.engine.scheduler import Chunk
from deployments.engine.sequence import Sequence as EngineSequence
from deployments.model.kv_cache import PAGE, TokenSpan
from deployments.model.model import Model
from deployments.places.hook_site import HookSite
from deployments.readouts.gates import Gate
from deployments.readouts.reading import ReadoutReader, ReadSpan, Stacks


class ForwardResult(NamedTuple):
    """The result of a forward pass.

    Attributes:
        sequences: Those whose next token it predicts; a sequence whose prompt is incomplete is left out.
        logits: [sequences, vocabulary].
        lens: Index in `sequences` -> the result of each layer, for sequences with a lens.
        stopped: Index in `sequences` -> the condition and the row that met it, for sequences that `stop_when` ends.
    """

    sequences: list[EngineSequence]
    logits: torch.Tensor
    lens: Mapping[int, tuple[LayerTokens, ...]] = MappingProxyType({})
    stopped: Mapping[int, tuple[Gate, int]] = MappingProxyType({})


class Runner:
    """Runs sequences through the model. A failure leaves sequences and recordings unchanged."""

    def __init__(self, model: Model, memory: KvMemory, ring: CaptureRing) -> None:
        self._model = model
        self._memory = memory
        self._ring = ring
        self._plans = Plans()
        self._lenses = LensReader([])  # of the last forward pass
        self._stacks = Stacks()

    def run(self, chunks: Sequence[Chunk]) -> ForwardResult:
        """Run one forward pass.

        Args:
            chunks: The chunks to run; their pages are reserved.
        """
        model = self._model
        chunks = self._in_order(chunks)
        capture = _Capture(self._ring, chunks)
        plan = self._plans.of(chunks)
        deciding = [chunk for chunk in chunks if chunk.decides]
        drawn = [LensRow(_last_row(chunk), asked) for chunk in deciding if (asked := chunk.sequence.lens)]
        prompts = _prompt_lenses(chunks)
        with_lens = [*drawn, *(lens.row for lens in prompts)]
        if with_lens != self._lenses.asking:  # the last reader is reused while the same rows have a lens
            self._lenses = LensReader(with_lens)
        lenses = self._lenses
        lenses.begin()
        readouts = ReadoutReader([_read_span(chunk) for chunk in chunks], self._stacks)

        def visit(place: HookSite, value: Any) -> torch.Tensor | None:
            new = plan.apply(place, value, readouts)
            seen = value if new is None else new
            capture.take(place, seen)
            lenses.take(place, seen)
            readouts.take(place, seen)
            return new

        places = [*capture.places, *plan.places, *lenses.places, *readouts.places]
        scored = [
            (scores, range(chunk.row + unscored.start, chunk.row + unscored.stop))
            for chunk in chunks
            if (scores := chunk.sequence.scores) and (unscored := scores.wanted(chunk.start, chunk.count))
        ]
        wanted = [_last_row(chunk) for chunk in deciding] + [row for _, rows in scored for row in rows]
        logits = model.forward(
            [token for chunk in chunks for token in _tokens(chunk)],
            [TokenSpan(chunk.sequence.kv, chunk.start, chunk.count) for chunk in chunks],
            wanted,
            self._memory.cache,
            places,
            visit,
            every_logit=any(place.module == model.head for place in places),
            readers=capture.readers,
        )
        parts = torch.split(logits[len(deciding) :], [len(rows) for _, rows in scored]) if scored else ()
        logprobs = [scores.read(part) for (scores, _), part in zip(scored, parts, strict=True)]
        layers = lenses.read(model.unembedding)  # before any state changes: these may run out of memory
        capture.stack()
        of_deciding = iter(layers)
        by_turn = {turn: next(of_deciding) for turn, chunk in enumerate(deciding) if chunk.sequence.lens}
        met = readouts.keep()
        stopped = {turn: met[row] for turn, chunk in enumerate(deciding) if (row := _last_row(chunk)) in met}
        capture.keep()
        for (scores, _), new in zip(scored, logprobs, strict=True):
            scores.add(new)
        for lens, of_prompt in zip(prompts, layers[len(drawn) :], strict=True):
            lens.sequence.prompt_lens.append((lens.position, of_prompt))
        for chunk in chunks:
            self._fed(chunk)
        return ForwardResult([chunk.sequence for chunk in deciding], logits[: len(deciding)], by_turn, stopped)

    def _in_order(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """The chunks with their rows: first those whose row goes through the ring, in its order."""
        ordered = list(chunks)
        if self._model.packs:
            decoding = {
                recording: chunk
                for chunk in chunks
                if (recording := chunk.sequence.recording) and chunk.sequence.decodes and recording.wants_generated
            }
            ordered = [decoding[recording] for recording in self._ring.arrange(list(decoding))]
            ordered += [chunk for chunk in chunks if chunk.sequence.recording not in decoding]
        firsts = accumulate((chunk.count for chunk in ordered), initial=0)
        return [Chunk(p.sequence, p.start, p.count, row) for p, row in zip(ordered, firsts, strict=False)]

    def _fed(self, chunk: Chunk) -> None:
        """Update the sequence of a chunk whose forward pass succeeded."""
        seq = chunk.sequence
        before, seq.fed = seq.fed, chunk.start + chunk.count
        if seq.recording:
            seq.recording.rows = max(seq.recording.rows, seq.fed)
        if self._model.packs and seq.fed // PAGE > before // PAGE:  # it has filled a page
            self._memory.remember(seq.kv, seq.token_ids, min(seq.fed, seq.unchanged))


class _PromptLens(NamedTuple):
    """A prompt token at which a sequence reads the lens, and its row in the forward pass."""

    sequence: EngineSequence
    position: int
    row: LensRow


def _prompt_lenses(chunks: Sequence[Chunk]) -> list[_PromptLens]:
    return [
        _PromptLens(chunk.sequence, position, LensRow(chunk.row + position - chunk.start, asked))
        for chunk in chunks
        if (asked := chunk.sequence.request.lens)
        for position in chunk.sequence.lensed(chunk.start, chunk.start + chunk.count)
    ]


def _read_span(chunk: Chunk) -> ReadSpan:
    seq, request = chunk.sequence, chunk.sequence.request
    return ReadSpan(seq.readouts, request.gates, request.stop_when, chunk.start, chunk.count, chunk.row, chunk.decides)


def _last_row(chunk: Chunk) -> int:
    return chunk.row + chunk.count - 1


def _tokens(chunk: Chunk) -> Sequence[int]:
    seq, stop, prompt = chunk.sequence, chunk.start + chunk.count, len(chunk.sequence.request.prompt)
    if stop <= prompt:
        return seq.request.prompt[chunk.start : stop]
    if chunk.start >= prompt:
        return seq.tokens[chunk.start - prompt : stop - prompt]
    return [*seq.request.prompt[chunk.start :], *seq.tokens[: stop - prompt]]


class _Capture:
    """Records one forward pass.

    Single decoded rows go through the ring. Prompts' rows are gathered, or copied one by one if gathering would take
    much memory, and for attention patterns and chosen heads or features.

    Attributes:
        places: The places to read.
        readers: For each place of attention patterns, the spans that are read.
    """

    def __init__(self, ring: CaptureRing, chunks: Sequence[Chunk]) -> None:
        self._ring = ring
        self._through_ring = len(ring.recordings)
        indexed = [
            (index, PromptRows(recording, chunk.row, chunk.start, chunk.count).after(recording.rows))
            for index, chunk in enumerate(chunks)
            if index >= self._through_ring and (recording := chunk.sequence.recording)
            if chunk.sequence.records_prefill
        ]
        self._prompts = [prompt for _, prompt in indexed]
        self._gathered, self._copied = gatherings(self._prompts, ring.window)
        self._came = set[HookSite]()
        recordings = [prompt.recording for prompt in self._prompts]
        self._ringing = set(ring.places)
        self.places = [*ring.places, *(place for place in places_of(recordings) if place not in self._ringing)]
        self.readers = {
            place: [i for i, recording in enumerate(ring.recordings) if recording.reads(place)]
            + [index for index, prompt in indexed if prompt.recording.reads(place)]
            for place in self.places
            if place.grows
        }
        if ring.recordings:
            ring.begin()

    def take(self, place: HookSite, value: Any) -> None:
        """Copy the recorded rows of a place's value [rows, ...]; for patterns, a list of [tokens, heads, keys]."""
        self._came.add(place)
        shown = iter(value) if place.grows else None
        if place in self._ringing:
            if shown is None:
                self._ring.take(place, value[: self._through_ring])
            else:
                self._ring.take_patterns(place, shown)
        for gathered in self._gathered:
            gathered.take(place, value)
        for recording, row, start, count in self._copied:
            if recording.reads(place):
                values = value[row : row + count] if shown is None else next(shown)
                recording.write(place, values[len(values) - count :], start)

    def stack(self) -> None:
        """Bring gathered rows to the host."""
        for gathered in self._gathered:
            gathered.stack()

    def keep(self) -> None:
        """Count the copied rows after the forward pass has succeeded."""
        for prompt in self._prompts:
            prompt.recording.require(self._came)
        for gathered in self._gathered:
            gathered.split()
        for recording, _, start, count in self._prompts:
            recording.keep(start, count)
        if self._ring.recordings:
            self._ring.end(self._came)
