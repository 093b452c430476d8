"""What becomes of a finished request's activations: stored, given inline, or failed with a reason."""

from __future__ import annotations

import asyncio
import hashlib
import importlib.metadata
import json
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, replace
from typing import Any

import ray
from ray.exceptions import RayError

from deployments.activations.facts import RunFacts, ShardFacts, StoredRun, StoreError
from deployments.activations.segments.schema import to_batch
from deployments.chat.token_texts import TextOffsets, TokenTexts
from deployments.engine.capture.buffer import joined
from deployments.engine.capture.captured import Captured
from deployments.engine.capture.row_sizes import RowSizes
from deployments.engine.request import Finished, Request
from deployments.errors import RequestError
from deployments.messages import Job, RunReport
from deployments.model.model import Model
from deployments.options import Options
from deployments.points.capture import Capture
from deployments.points.interventions import as_sent
from deployments.points.names import dtype_name
from deployments.points.token_choices import Tokens, resolve

logger = logging.getLogger("ray.serve")
PACKAGES = ("vitrine", "torch", "transformers", "nnsight", "pyarrow")
RENEW_S = 120.0  # after which the store is told that a run goes on: far less than it waits for one
ROOM_S = 30.0  # the longest that a request waits to hear whether its activations can be stored


class Runs:
    """A replica's way to the activation store."""

    def __init__(self, options: Options, model: Model, token_texts: TokenTexts, store: Any, pool: Executor) -> None:
        """Take what every run is described by.

        Args:
            options: The operator's.
            model: The model that is recorded.
            token_texts: How its tokens are written.
            store: The handle of who takes this node's runs: the activation store, or a writer of the node.
            pool: Where rows are laid out, off the event loop.
        """
        self._options = options
        self._model = model
        self._token_texts = token_texts
        self._store = store
        self._pool = pool
        # Looking one up takes two milliseconds.
        self._versions = {name: importlib.metadata.version(name) for name in PACKAGES}

    def check(self, requests: Sequence[Request]) -> None:
        """Refuse what could record more than the operator's limits.

        Args:
            requests: All choices of one job, which capture alike.

        Raises:
            RequestError: They could hold more bytes, or an inline answer more numbers.
        """
        capture, points = requests[0].capture, requests[0].points
        if capture is None:
            return
        rows = [_rows(request) for request in requests]
        if any(isinstance(positions, tuple) for positions in rows) and (
            grown := next((point.name for point in points if point.place.grows), None)
        ):
            message = f"{grown}: attention patterns are recorded of tokens that follow each other: choose such"
            raise RequestError(message, "capture.tokens")
        sizes, numbers = RowSizes.bytes(capture, points), RowSizes.numbers(capture, points)
        size, limit = sum(map(sizes.of, rows)), self._options.max_capture_bytes
        if size > limit:
            message = f"up to {size} bytes would be recorded, the limit is {limit}: capture less, or set max_tokens"
            raise RequestError(message, "capture", "capture_too_large")
        held = max(sizes.until_end(_tokens(request), len(request.prompt) + request.max_tokens) for request in requests)
        limit = self._options.capture_memory_bytes // 2
        if held > limit:
            message = f"its rows take {held} bytes, {limit} can be held until the end: ask for fewer, or all"
            raise RequestError(message, "capture.tokens", "capture_too_large")
        count, limit = sum(map(numbers.of, rows)), self._options.max_inline_values
        if capture.destination == "inline" and count > limit:
            message = f"up to {count} numbers would come inline, the limit is {limit}: capture less, or by reference"
            raise RequestError(message, "capture.return", "capture_too_large")

    async def check_room(self, job: Job, requests: Sequence[Request]) -> None:
        """Refuse, before it runs, a job whose activations are required and that the store cannot take now.

        Args:
            job: The job.
            requests: As for `check`. The store is not asked where they would be answered without it.

        Raises:
            RequestError: The store says why, or does not answer.
        """
        capture, points = requests[0].capture, requests[0].points
        if capture is None or not capture.required or capture.destination == "inline":
            return
        size = sum(map(RowSizes.bytes(capture, points).of, map(_rows, requests)))
        try:
            if job.unstorable:
                raise StoreError(job.unstorable)
            async with asyncio.timeout(ROOM_S):
                await self._store.check_room.remote(job.session_id, size)
        except (StoreError, RayError, TimeoutError) as error:
            reason = str(getattr(error, "cause", None) or error) or f"the store does not answer within {ROOM_S:g} s"
            message = f"the activations cannot be stored now: {reason}"
            raise RequestError(message, "capture.required", "store_unavailable", 503) from error

    def open(self, job: Job, request: Request, index: int) -> OpenRun:
        """The run of the job's choice of this index, which takes its rows as they come."""
        return OpenRun(self, job, request, index, TextOffsets(self._token_texts))

    async def append(self, run: OpenRun, captured: Captured, part: int) -> None:
        """Send rows of a run that is not finished; they need no memory here when this returns.

        Raises:
            StoreError: The store cannot take them; or its errors over Ray.
        """
        batch = await self._put(run, captured, ())
        await self._store.append.remote(run.job.session_id, run.id, part, [batch], run.most, run.job.fence)

    async def write(self, run: OpenRun, event: Finished, parts: int) -> StoredRun:
        """Send a run's last rows; durable when it answers.

        Raises:
            StoreError: The store cannot take them; or its errors over Ray.
        """
        assert event.captured is not None
        batches = [await self._put(run, event.captured, event.tokens)] if event.captured.positions else []
        archived = self._options.answer_when == "archived"
        facts = self._facts(run, event)
        stored: StoredRun = await self._store.write.remote(facts, batches, parts, run.job.fence, archived)
        return stored

    def renew(self, run: OpenRun) -> None:
        """Tell the store that a run goes on."""
        self._store.renew.remote(run.job.session_id, run.id)

    def abandon(self, run: OpenRun) -> None:
        """Have the store forget a run that will not be finished."""
        self._store.abandon.remote(run.job.session_id, run.id)

    async def _put(self, run: OpenRun, captured: Captured, generated: Sequence[int]) -> Any:
        """A reference to rows in the object store; they are laid out off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._lay_out, run, captured, generated)

    def _lay_out(self, run: OpenRun, captured: Captured, generated: Sequence[int]) -> Any:
        job, request = run.job, run.request
        assert job.capture is not None
        shard = ShardFacts(
            session_id=job.session_id,
            model=self._options.served_name,
            revision=self._options.revision,
            architecture=type(self._model.hf).__name__,
            versions=self._versions,
            modules={point.name: point.module for point in request.points},
            layers=self._model.points.layer_count,
        )
        batch = to_batch(
            shard,
            run_id=run.id,
            sample_id=run.sample_id,
            positions=captured.positions,
            token_ids=captured.token_ids,
            text_offsets=run.text_offsets(captured, generated),
            prompt_tokens=len(request.prompt),
            points=captured.values,
        )
        return ray.put(batch)

    def _facts(self, run: OpenRun, event: Finished) -> RunFacts:
        job, request = run.job, run.request
        assert job.capture is not None
        spoken = json.dumps(job.messages if job.messages is not None else job.prompts, sort_keys=True, default=list)
        return RunFacts(
            run_id=run.id,
            session_id=job.session_id,
            model=self._options.served_name,
            created=run.created,
            prompt_tokens=len(event.prompt),
            tokens=len(event.prompt) + len(event.tokens),
            sample_id=run.sample_id,
            tags=run.tags,
            sampling={**asdict(request.sampling), "max_tokens": request.max_tokens},
            finish_reason=event.reason,
            request_id=job.request_id or job.id,
            messages_hash=hashlib.sha256(spoken.encode()).hexdigest(),
            interventions=as_sent(job.changes(run.number).values()),
            text=run.text(event) if job.capture.store_text else None,
        )


class OpenRun:
    """One choice's run on its way: rows go out in the order in which they come.

    Attributes:
        id: The run's name.
        job: The job it is of.
        number: Which of its prompt's choices it is.
        request: The engine's request it records.
        sample_id: The user's name for the sample.
        tags: The user's strings by name.
        created: When the job came, in Unix seconds, plus its index in microseconds: lists of runs are in the order of
            requests and of their choices, whichever is done first.
        most: The most bytes that it may record.
    """

    def __init__(self, runs: Runs, job: Job, request: Request, index: int, offsets: TextOffsets) -> None:
        self.id = job.run_ids[index] if job.run_ids else f"run-{request.id}"
        self.job = job
        self.number = index % job.n
        self.request = request
        self.created = job.created + index * 1e-6
        assert request.capture is not None
        self.sample_id, self.tags = request.capture.labels_of(index // job.n)
        self.most = RowSizes.bytes(request.capture, request.points).of(_rows(request))
        self._runs = runs
        self._offsets = offsets
        self._pieces: list[Captured] = []  # of an inline answer
        self._sending: asyncio.Task[None] | None = None
        self._renewing: asyncio.TimerHandle | None = None
        self._parts = 0
        self._failed = job.unstorable if request.capture.destination != "inline" else None

    def add(self, captured: Captured, done: Callable[[], None]) -> None:
        """Take rows that the engine hands out before the request's end.

        Args:
            captured: The rows.
            done: Called when they need no memory here any more, also where they could not be stored.
        """
        assert self.job.capture is not None
        if self.job.capture.destination == "inline":  # a few numbers
            self._pieces.append(captured)
            done()
            return
        if self._renewing is None:
            self._renewing = asyncio.get_running_loop().call_later(RENEW_S, self._renew)
        self._sending = asyncio.ensure_future(self._send(self._sending, captured, done))

    def _renew(self) -> None:
        """However long the next rows take, the store keeps those that it has as long as the request goes on."""
        self._renewing = asyncio.get_running_loop().call_later(RENEW_S, self._renew)
        if self._failed is None:
            self._runs.renew(self)

    def _end_renewing(self) -> None:
        if self._renewing is not None:
            self._renewing.cancel()

    async def _send(self, before: asyncio.Task[None] | None, captured: Captured, done: Callable[[], None]) -> None:
        try:
            if before is not None:
                await before
            if self._failed is None:
                await self._runs.append(self, captured, self._parts)
                self._parts += 1
        except Exception as error:  # noqa: BLE001 - whatever it was, the answer comes and says so
            self._fail(error)
        finally:
            done()

    def _fail(self, error: Exception) -> None:
        # The completion is worth having without its activations; the answer says what happened.
        self._failed = str(getattr(error, "cause", None) or error)
        logger.warning("run %s was not stored: %s", self.id, self._failed)

    async def report(self, event: Finished) -> RunReport:
        """Store what was recorded last and say where all of it lies; durable when it answers."""
        assert self.job.capture is not None
        if self._sending is not None:
            await self._sending
        try:
            report = await self._settle(event)
        finally:
            self._end_renewing()
        if report.status == "failed":
            self.drop()
        return report

    async def _settle(self, event: Finished) -> RunReport:
        assert self.job.capture is not None
        tokens = len(event.prompt) + len(event.tokens)
        report = RunReport(self.id, self.job.session_id, "failed", tokens, len(event.prompt))
        if self._failed is not None:
            return replace(report, reason=self._failed)
        if event.captured is None or event.error:
            return replace(report, reason=event.error or "nothing was recorded")
        if not event.captured.positions and not self._parts and not self._pieces:
            return replace(report, reason="no token was generated, and only those were asked for")
        if self.job.capture.destination == "inline":
            captured = joined([*self._pieces, event.captured])
            return replace(report, status="inline", points=_inline(self.job.capture, captured))
        try:
            stored = await self._runs.write(self, event, self._parts)
        except (StoreError, RayError, ValueError) as error:
            self._fail(error)
            return replace(report, reason=self._failed)
        points = {name: point._asdict() for name, point in stored.points.items()}
        return replace(report, status="stored", points=points, node=stored.node)

    def text_offsets(self, captured: Captured, generated: Sequence[int]) -> list[int]:
        """Characters of prompt + generated text before each recorded token.

        Args:
            captured: The rows, those of earlier calls behind it.
            generated: All generated tokens, or none where the rows are contiguous with earlier ones.
        """
        ends, prompt = self._offsets.ends, self.request.prompt
        if len(ends) == 1:
            self._offsets.add(prompt)
        known = len(ends) - 1
        if generated:
            self._offsets.add(generated[known - len(prompt) :])
        else:
            pairs = zip(captured.positions, captured.token_ids, strict=True)
            self._offsets.add(token for position, token in pairs if position >= known)
        return [ends[position] for position in captured.positions]

    def text(self, event: Finished) -> str:
        """Prompt and generated text, special tokens included."""
        tokens, known = (*event.prompt, *event.tokens), len(self._offsets.ends) - 1
        self._offsets.add(tokens[known:])
        return self._offsets.close()

    def drop(self) -> None:
        """Forget the run: its client has gone, or it failed."""
        self._end_renewing()
        if self._sending is not None:
            self._failed = self._failed or "the request was given up"
            self._runs.abandon(self)


def _tokens(request: Request) -> Tokens:
    assert request.capture is not None
    return resolve(request.capture.tokens, len(request.prompt), "capture.tokens")


def _rows(request: Request) -> Sequence[int]:
    """Positions of the tokens that one choice may record, at the most.

    Raises:
        RequestError: It cannot have such a token; names the field.
    """
    tokens, most = _tokens(request), len(request.prompt) + request.max_tokens
    if tokens.apart and tokens.stop is not None and tokens.stop > most:
        raise RequestError(f"there are tokens 0 to {most - 1}, prompt and answer together", "capture.tokens")
    return tokens.of(most)


def _inline(capture: Capture, captured: Captured) -> dict[str, dict[str, Any]]:
    features = capture.features
    info = "all_features" if features is None else f"first_{features.first}_features"
    if features and features.index:
        info = f"{len(features.index)}_listed_features"
    return {
        name: {
            "format": "sampled_tensor",
            "shape": list(value.shape),
            "dtype": dtype_name(value.dtype),
            "data": [row.float().tolist() for row in value],
            "sample_info": info,
        }
        for name, value in captured.values.items()
    }
