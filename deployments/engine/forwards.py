"""The two kinds of forward: prompts, and one token of every request whose prompt is in."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch

from deployments.engine.batch import Batch
from deployments.engine.edits import Plan, Plans, Spans
from deployments.engine.lens import Asking, Lenses
from deployments.engine.memory import KvMemory
from deployments.engine.model import Model
from deployments.engine.recorder import Recorder, places_of
from deployments.engine.request import LayerLens
from deployments.engine.row import Row
from deployments.engine.schedule import Prefill
from deployments.engine.scoring import asked_of, read
from deployments.points.resolving import Place


class Outcome(NamedTuple):
    """What a forward brought.

    Attributes:
        rows: The rows whose next token it decides; none where a prompt is not all in yet.
        logits: [rows, vocabulary].
        lens: For each row that asks, by its turn among these, what comes of each layer.
    """

    rows: list[Row]
    logits: torch.Tensor
    lens: Mapping[int, tuple[LayerLens, ...]] = MappingProxyType({})


class Forwards:
    """Runs rows through the model. What fails leaves rows, slots and recordings as they were."""

    def __init__(self, model: Model, memory: KvMemory, batch: Batch, recorder: Recorder) -> None:
        self._model = model
        self._memory = memory
        self._cache = memory.cache
        self._batch = batch
        self._recorder = recorder
        self._plans = Plans()
        self._lenses = Lenses([])  # of the last decode

    def prefill(self, prefill: Prefill) -> Outcome:
        """Run prompts, or a piece of one, into slots behind those in use or the one it has."""
        rows, start, counts = prefill
        batch, model = self._batch, self._model
        first = batch.rows.index(rows[0]) if start else len(batch)
        new = [] if start else rows
        longest = max(counts)
        self._reserve(rows, new, start + longest)
        pieces = [row.sequence[start : start + count] for row, count in zip(rows, counts, strict=True)]
        padded = [piece + [0] * (longest - len(piece)) for piece in pieces]
        ids = torch.tensor(padded, device=model.device)  # [rows, longest]
        lengths = torch.tensor(counts, device=model.device)
        recordings = [(i, row.recording) for i, row in enumerate(rows) if row.recording and row.records_prefill]
        fresh = [slice(max(0, recording.rows - start), counts[i]) for i, recording in recordings]  # not recorded before
        places = places_of(recording for _, recording in recordings)
        readers = {place: [i for i, one in recordings if one.reads(place)] for place in places if place.grows}
        came = set()
        plan = Plan([Spans(row.request.edits, start, start + count) for row, count in zip(rows, counts, strict=True)])

        whole = [i for i, row in enumerate(rows) if start + counts[i] == row.length]
        deciding = [Asking(i, counts[i] - 1, row.lens) for i, row in enumerate(rows) if row.lens and i in whole]
        reading = [
            Asking(i, position - start, row.request.lens)
            for i, row in enumerate(rows)
            if row.request.lens
            for position in row.lensed(start, start + counts[i])
        ]
        lenses = Lenses([*deciding, *reading])

        def visit(place: Place, value: torch.Tensor) -> torch.Tensor | None:
            new = plan.apply(place, value)
            seen = value if new is None else new
            came.add(place)
            for (i, recording), tokens in zip(recordings, fresh, strict=True):
                if recording.reads(place):
                    row = readers[place].index(i) if place.grows else i
                    recording.write(place, seen[row, tokens], start + tokens.start)
            lenses.take(place, seen)
            return new

        self._cache.prefill(first, start)
        places = [*places, *plan.places, *lenses.places]
        every = any(place.module == model.head for place in places)
        asked = asked_of([row.scores for row in rows], start, counts)
        beside = [(one.row, one.span) for one in asked]
        logits = model.prefill(ids, lengths, self._cache, places, visit, every, start, beside, readers)
        scored = read(asked, logits[len(rows) :])
        lens = lenses.read(model.unembedding)
        for (_, recording), tokens in zip(recordings, fresh, strict=True):
            recording.require(came)
            recording.keep(start + tokens.start, max(0, tokens.stop - tokens.start))
        for one, logprobs in zip(asked, scored, strict=True):
            one.scores.add(logprobs)
        for read_at, layers in zip(reading, lens[len(deciding) :], strict=True):
            rows[read_at.row].prompt_lens.append((start + read_at.at, layers))
        for row in new:
            batch.add(row)
        for row, count in zip(rows, counts, strict=True):
            row.fed = start + count
            if row.recording:
                row.recording.rows = max(row.recording.rows, row.fed)
        by_row = {read_at.row: layers for read_at, layers in zip(deciding, lens, strict=False)}
        return Outcome(
            [rows[i] for i in whole], logits[whole], {turn: by_row[i] for turn, i in enumerate(whole) if i in by_row}
        )

    def _reserve(self, rows: list[Row], new: list[Row], stop: int) -> None:
        """Have room for a prefill up to position `stop`."""
        batch = self._batch
        needs = [row.need for row in (*new, *batch.rows)]
        if not new:  # room for all of it was found when it was admitted
            needs = [stop, *(row.fed for row in batch.rows)]
        self._memory.reserve(len(batch) + len(new), max(needs), keep=len(batch) > 0)
        for row in rows:
            row.written = max(row.written, stop)

    def decode(self) -> Outcome:
        """Run one token of all rows that decode."""
        rows = list(self._batch.decoding)
        device = self._model.device
        if not rows:  # all had to make room
            return Outcome(rows, torch.empty(0, 0, device=device))
        slots = torch.arange(len(rows), device=device)
        positions = torch.tensor([row.fed for row in rows], device=device)
        ids = torch.tensor([row.tokens[-1] for row in rows], device=device)
        longest = max(row.fed for row in rows) + 1
        self._cache.decode(slots, positions, longest)
        recorder, reading = self._recorder, self._recorder.places()
        if reading:
            recorder.begin(reading, self._cache.window.slots)
        plan = self._plans.decode([Spans(row.request.edits, row.fed, row.fed + 1) for row in rows])
        lenses = self._lenses_of([Asking(i, 0, row.lens) for i, row in enumerate(rows) if row.lens])
        wanted = set(reading)
        readers = {place: recorder.readers(place) for place in reading if place.grows}

        def visit(place: Place, value: torch.Tensor) -> torch.Tensor | None:
            new = plan.apply(place, value)
            seen = value if new is None else new
            if place in wanted:
                recorder.take(place, seen)
            lenses.take(place, seen)
            return new

        for row in rows:
            row.written = max(row.written, row.fed + 1)
        places = [*reading, *plan.places, *lenses.places]
        logits = self._model.decode(ids, positions, longest, self._cache, places, visit, readers)
        read_lens = lenses.read(self._model.unembedding)  # before anything counts: it may find no memory
        lens = {one.row: layers for one, layers in zip(lenses.asking, read_lens, strict=True)}
        if reading:
            recorder.end()
        for row in rows:
            row.fed += 1
        return Outcome(rows, logits, lens)

    def _lenses_of(self, asking: list[Asking]) -> Lenses:
        """Those of a decode, which are the last one's while the same rows ask."""
        if asking != self._lenses.asking:
            self._lenses = Lenses(asking)
        self._lenses.begin()
        return self._lenses
