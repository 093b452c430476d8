"""The two kinds of forward: prompts, and one token of every request whose prompt is in."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch

from deployments.engine.batch import Batch
from deployments.engine.capture.ring import CaptureRing, places_of
from deployments.engine.edits import Plan, Plans, Spans
from deployments.engine.gates import Leaf
from deployments.engine.kv_memory import KvMemory
from deployments.engine.logit_lens import LensReader, LensRow
from deployments.engine.prompt_logprobs import read, spans_of
from deployments.engine.readouts import ReadoutReader, ReadSpan, Stacks
from deployments.engine.request import LayerTokens
from deployments.engine.scheduler import Prefill
from deployments.engine.sequence import Sequence
from deployments.model.model import Model
from deployments.places.place import Place


class ForwardResult(NamedTuple):
    """What a forward brought.

    Attributes:
        sequences: Those whose next token it decides; none where a prompt is not all in yet.
        logits: [rows, vocabulary].
        lens: For each sequence that asks, by its turn among these, what comes of each layer.
        stopped: For each sequence that its `stop_when` ends, by its turn, the condition and the row that met it.
    """

    sequences: list[Sequence]
    logits: torch.Tensor
    lens: Mapping[int, tuple[LayerTokens, ...]] = MappingProxyType({})
    stopped: Mapping[int, tuple[Leaf, int]] = MappingProxyType({})


class Runner:
    """Runs sequences through the model. What fails leaves sequences, slots and recordings as they were."""

    def __init__(self, model: Model, memory: KvMemory, batch: Batch, ring: CaptureRing) -> None:
        self._model = model
        self._memory = memory
        self._cache = memory.cache
        self._batch = batch
        self._ring = ring
        self._plans = Plans()
        self._lenses = LensReader([])  # of the last decode
        self._stacks = Stacks()

    def prefill(self, prefill: Prefill) -> ForwardResult:
        """Run prompts, or a piece of one, into slots behind those in use or the one it has."""
        seqs, start, counts = prefill
        batch, model = self._batch, self._model
        first = batch.sequences.index(seqs[0]) if start else len(batch)
        new = [] if start else seqs
        longest = max(counts)
        self._reserve(seqs, new, start + longest)
        pieces = [seq.token_ids[start : start + count] for seq, count in zip(seqs, counts, strict=True)]
        padded = [piece + [0] * (longest - len(piece)) for piece in pieces]
        ids = torch.tensor(padded, device=model.device)  # [rows, longest]
        lengths = torch.tensor(counts, device=model.device)
        recordings = [(i, seq.recording) for i, seq in enumerate(seqs) if seq.recording and seq.records_prefill]
        fresh = [slice(max(0, recording.rows - start), counts[i]) for i, recording in recordings]  # not recorded before
        places = places_of(recording for _, recording in recordings)
        readers = {place: [i for i, one in recordings if one.reads(place)] for place in places if place.grows}
        came = set()
        plan = Plan([Spans(seq.request.edits, start, start + count) for seq, count in zip(seqs, counts, strict=True)])

        whole = [i for i, seq in enumerate(seqs) if start + counts[i] == seq.length]
        deciding = [LensRow(i, counts[i] - 1, seq.lens) for i, seq in enumerate(seqs) if seq.lens and i in whole]
        reading = [
            LensRow(i, position - start, seq.request.lens)
            for i, seq in enumerate(seqs)
            if seq.request.lens
            for position in seq.lensed(start, start + counts[i])
        ]
        lenses = LensReader([*deciding, *reading])
        readouts = ReadoutReader(
            [
                ReadSpan(seq.request, seq.readouts, start, counts[i], i * longest, i in whole)
                for i, seq in enumerate(seqs)
            ],
            self._stacks,
        )

        def visit(place: Place, value: torch.Tensor) -> torch.Tensor | None:
            new = plan.apply(place, value, readouts)
            seen = value if new is None else new
            came.add(place)
            for (i, recording), tokens in zip(recordings, fresh, strict=True):
                if recording.reads(place):
                    at = readers[place].index(i) if place.grows else i
                    recording.write(place, seen[at, tokens], start + tokens.start)
            lenses.take(place, seen)
            readouts.take(place, seen)
            return new

        self._cache.prefill(first, start)
        places = [*places, *plan.places, *lenses.places, *readouts.places]
        every = any(place.module == model.head for place in places)
        asked = spans_of([seq.scores for seq in seqs], start, counts)
        beside = [(one.row, one.span) for one in asked]
        logits = model.prefill(ids, lengths, self._cache, places, visit, every, start, beside, readers)
        scored = read(asked, logits[len(seqs) :])
        lens = lenses.read(model.unembedding)
        stopped = readouts.keep()
        for (_, recording), tokens in zip(recordings, fresh, strict=True):
            recording.require(came)
            recording.keep(start + tokens.start, max(0, tokens.stop - tokens.start))
        for one, logprobs in zip(asked, scored, strict=True):
            one.scores.add(logprobs)
        for read_at, layers in zip(reading, lens[len(deciding) :], strict=True):
            seqs[read_at.row].prompt_lens.append((start + read_at.at, layers))
        for seq in new:
            batch.add(seq)
        for seq, count in zip(seqs, counts, strict=True):
            seq.fed = start + count
            if seq.recording:
                seq.recording.rows = max(seq.recording.rows, seq.fed)
        by_row = {read_at.row: layers for read_at, layers in zip(deciding, lens, strict=False)}
        ended = {turn: stopped[at] for turn, i in enumerate(whole) if (at := i * longest + counts[i] - 1) in stopped}
        said = {turn: by_row[i] for turn, i in enumerate(whole) if i in by_row}
        return ForwardResult([seqs[i] for i in whole], logits[whole], said, ended)

    def _reserve(self, seqs: list[Sequence], new: list[Sequence], stop: int) -> None:
        """Have room for a prefill up to position `stop`."""
        batch = self._batch
        needs = [seq.need for seq in (*new, *batch.sequences)]
        if not new:  # room for all of it was found when it was admitted
            needs = [stop, *(seq.fed for seq in batch.sequences)]
        self._memory.reserve(len(batch) + len(new), max(needs), keep=len(batch) > 0)
        for seq in seqs:
            seq.written = max(seq.written, stop)

    def decode(self) -> ForwardResult:
        """Run one token of all sequences that decode."""
        seqs = list(self._batch.decoding)
        device = self._model.device
        if not seqs:  # all had to make room
            return ForwardResult(seqs, torch.empty(0, 0, device=device))
        slots = torch.arange(len(seqs), device=device)
        positions = torch.tensor([seq.fed for seq in seqs], device=device)
        ids = torch.tensor([seq.tokens[-1] for seq in seqs], device=device)
        longest = max(seq.fed for seq in seqs) + 1
        self._cache.decode(slots, positions, longest)
        ring, reading = self._ring, self._ring.places()
        if ring.recordings:
            ring.begin(reading, self._cache.window.slots)
        plan = self._plans.decode([Spans(seq.request.edits, seq.fed, seq.fed + 1) for seq in seqs])
        lenses = self._lenses_of([LensRow(i, 0, seq.lens) for i, seq in enumerate(seqs) if seq.lens])
        wanted = set(reading)
        readouts = ReadoutReader(
            [ReadSpan(seq.request, seq.readouts, seq.fed, 1, i, True) for i, seq in enumerate(seqs)], self._stacks
        )
        readers = {place: ring.readers(place) for place in reading if place.grows}

        def visit(place: Place, value: torch.Tensor) -> torch.Tensor | None:
            new = plan.apply(place, value, readouts)
            seen = value if new is None else new
            if place in wanted:
                ring.take(place, seen)
            lenses.take(place, seen)
            readouts.take(place, seen)
            return new

        for seq in seqs:
            seq.written = max(seq.written, seq.fed + 1)
        places = [*reading, *plan.places, *lenses.places, *readouts.places]
        logits = self._model.decode(ids, positions, longest, self._cache, places, visit, readers)
        read_lens = lenses.read(self._model.unembedding)  # before anything counts: it may find no memory
        lens = {one.row: layers for one, layers in zip(lenses.asking, read_lens, strict=True)}
        stopped = readouts.keep()
        if ring.recordings:
            ring.end()
        for seq in seqs:
            seq.fed += 1
        return ForwardResult(seqs, logits, lens, stopped)

    def _lenses_of(self, asking: list[LensRow]) -> LensReader:
        """Those of a decode, which are the last one's while the same sequences ask."""
        if asking != self._lenses.asking:
            self._lenses = LensReader(asking)
        self._lenses.begin()
        return self._lenses
