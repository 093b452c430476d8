"""One forward pass: pieces of prompts and the next token of every decoding sequence, packed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from deployments.engine.capture.gathering import PromptRows, gatherings
from deployments.engine.capture.ring import CaptureRing, places_of
from deployments.engine.decoding.lens_reader import LensReader, LensRow
from deployments.engine.decoding.prompt_logprobs import read, spans_of
from deployments.engine.edit_plans import Plans, Span
from deployments.engine.kv_memory import KvMemory
from deployments.engine.request import LayerTokens
from deployments.engine.scheduler import Piece
from deployments.engine.sequence import Sequence as EngineSequence
from deployments.model.kv_cache import TokenSpan
from deployments.model.model import Model
from deployments.places.place import Place
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

    def run(self, pieces: Sequence[Piece]) -> ForwardResult:
        """Run one forward pass.

        Args:
            pieces: The pieces to run; their pages are reserved.
        """
        model = self._model
        pieces = self._in_order(pieces)
        capture = _Capture(self._ring, pieces)
        plan = self._plans.of([Span(p.sequence.request.edits, p.start, p.count, p.row) for p in pieces])
        deciding = [piece for piece in pieces if piece.decides]
        drawn = [LensRow(_last_row(piece), asked) for piece in deciding if (asked := piece.sequence.lens)]
        prompts = _prompt_lenses(pieces)
        lenses = self._lenses_of([*drawn, *(lens.row for lens in prompts)])
        readouts = ReadoutReader(
            [_read_span(piece) for piece in pieces],
            self._stacks,
        )

        def visit(place: Place, value: Any) -> torch.Tensor | None:
            new = plan.apply(place, value, readouts)
            seen = value if new is None else new
            capture.take(place, seen)
            lenses.take(place, seen)
            readouts.take(place, seen)
            return new

        places = [*capture.places, *plan.places, *lenses.places, *readouts.places]
        scored = spans_of([piece.sequence.scores for piece in pieces], pieces)
        wanted = [_last_row(piece) for piece in deciding] + [row for one in scored for row in one.rows]
        logits = model.forward(
            [token for piece in pieces for token in _tokens(piece)],
            [TokenSpan(piece.sequence.kv, piece.start, piece.count) for piece in pieces],
            wanted,
            self._memory.cache,
            places,
            visit,
            every_logit=any(place.module == model.head for place in places),
            readers=capture.readers,
        )
        logprobs = read(scored, logits[len(deciding) :])
        layers = lenses.read(model.unembedding)  # before any state changes: these may run out of memory
        capture.stack()
        found = iter(layers)
        by_turn = {turn: next(found) for turn, piece in enumerate(deciding) if piece.sequence.lens}
        met = readouts.keep()
        stopped = {turn: met[row] for turn, piece in enumerate(deciding) if (row := _last_row(piece)) in met}
        capture.keep()
        for span, scores in zip(scored, logprobs, strict=True):
            span.scores.add(scores)
        for lens, found_layers in zip(prompts, layers[len(drawn) :], strict=True):
            lens.sequence.prompt_lens.append((lens.position, found_layers))
        for piece in pieces:
            self._fed(piece)
        return ForwardResult([piece.sequence for piece in deciding], logits[: len(deciding)], by_turn, stopped)

    def _in_order(self, pieces: Sequence[Piece]) -> list[Piece]:
        """The pieces with their rows: first those whose row goes through the ring, in its order."""
        ordered = list(pieces)
        if self._model.packs:
            decoding = {
                recording: piece
                for piece in pieces
                if (recording := piece.sequence.recording) and piece.sequence.decodes and recording.wants_generated
            }
            ordered = [decoding[recording] for recording in self._ring.arrange(list(decoding))]
            ordered += [piece for piece in pieces if piece.sequence.recording not in decoding]
        firsts = accumulate((piece.count for piece in ordered), initial=0)
        return [Piece(p.sequence, p.start, p.count, row) for p, row in zip(ordered, firsts, strict=False)]

    def _fed(self, piece: Piece) -> None:
        """Update the sequence of a piece whose forward pass succeeded."""
        seq = piece.sequence
        before, seq.fed = seq.fed, piece.start + piece.count
        if seq.recording:
            seq.recording.rows = max(seq.recording.rows, seq.fed)
        if self._model.packs and self._memory.completes_page(before, seq.fed):
            self._memory.remember(seq.kv, seq.token_ids, min(seq.fed, seq.unchanged))

    def _lenses_of(self, asking: list[LensRow]) -> LensReader:
        """The lens reader of a forward pass; the last one is reused while the same rows have a lens."""
        if asking != self._lenses.asking:
            self._lenses = LensReader(asking)
        self._lenses.begin()
        return self._lenses


class _PromptLens(NamedTuple):
    """A prompt token at which a sequence reads the lens, and its row in the forward pass."""

    sequence: EngineSequence
    position: int
    row: LensRow


def _prompt_lenses(pieces: Sequence[Piece]) -> list[_PromptLens]:
    return [
        _PromptLens(piece.sequence, position, LensRow(piece.row + position - piece.start, asked))
        for piece in pieces
        if (asked := piece.sequence.request.lens)
        for position in piece.sequence.lensed(piece.start, piece.start + piece.count)
    ]


def _read_span(piece: Piece) -> ReadSpan:
    seq, request = piece.sequence, piece.sequence.request
    return ReadSpan(seq.readouts, request.gates, request.stop_when, piece.start, piece.count, piece.row, piece.decides)


def _last_row(piece: Piece) -> int:
    return piece.row + piece.count - 1


def _tokens(piece: Piece) -> Sequence[int]:
    """A piece's token ids."""
    seq, stop, prompt = piece.sequence, piece.start + piece.count, len(piece.sequence.request.prompt)
    if stop <= prompt:
        return seq.request.prompt[piece.start : stop]
    if piece.start >= prompt:
        return seq.tokens[piece.start - prompt : stop - prompt]
    return [*seq.request.prompt[piece.start :], *seq.tokens[: stop - prompt]]


class _Capture:
    """Records one forward pass.

    Single decoded rows go through the ring. Prompts' rows are gathered, or copied one by one if gathering would take
    much memory, and for attention patterns and chosen heads or features.

    Attributes:
        places: The places to read.
        readers: For each place of attention patterns, the spans that are read.
    """

    def __init__(self, ring: CaptureRing, pieces: Sequence[Piece]) -> None:
        self._ring = ring
        self._through_ring = len(ring.recordings)
        indexed = [
            (index, PromptRows(recording, piece.row, piece.start, piece.count).after(recording.rows))
            for index, piece in enumerate(pieces)
            if index >= self._through_ring and (recording := piece.sequence.recording)
            if piece.sequence.records_prefill
        ]
        self._prompts = [prompt for _, prompt in indexed]
        self._gathered, self._copied = gatherings(self._prompts, ring.window)
        self._came = set[Place]()
        recordings = [prompt.recording for prompt in self._prompts]
        ringing = ring.places()
        self._ringing = set(ringing)
        self.places = [*ringing, *(place for place in places_of(recordings) if place not in self._ringing)]
        self.readers = {
            place: [i for i, recording in enumerate(ring.recordings) if recording.reads(place)]
            + [index for index, prompt in indexed if prompt.recording.reads(place)]
            for place in self.places
            if place.grows
        }
        if ring.recordings:
            ring.begin()

    def take(self, place: Place, value: Any) -> None:
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
