"""Sends a replica's runs to the activation store: limits, room, and rows as Arrow batches."""

from __future__ import annotations

import asyncio
import hashlib
import importlib.metadata
import json
from collections.abc import Coroutine, Sequence
from concurrent.futures import Executor
from dataclasses import asdict
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError

from deployments import __version__
from deployments.activations.facts import FileInfo, RunEnd, RunInfo, RunLocation, StoreError
from deployments.activations.segments.columns import to_batch
from deployments.activations.segments.schema import Packed
from deployments.chat.token_texts import TextOffsets, TokenTexts
from deployments.engine.capture.row_sizes import RowSizes
from deployments.engine.request import Captured, Finished, Request
from deployments.errors import RequestError
from deployments.job import Job
from deployments.model.model import Model
from deployments.options import Options
from deployments.points.capture import MOST_INLINE_VALUES
from deployments.points.interventions import as_sent
from deployments.points.names import dtype_name
from deployments.points.placement import Layout
from deployments.replica.open_run import RunWriter, chosen_tokens, recordable

PACKAGES = ("torch", "transformers", "nnsight", "pyarrow")
INLINE_BYTES = 64 << 10  # rows below this go in the call itself, which Ray allows up to 100 KiB
PACKED_BYTES = 1 << 20  # rows above this are not copied into a stream
ROOM_S = 30.0  # the longest wait for the store to confirm that it has room


CALLS = 2  # at the same time, so that runs that end one by one do not wait for each other to be durable
PATIENCE_S = 0.25  # of runs that wait for a call: one may take long, until a run is archived or a node answers
MOST_RUNS = 64  # of a call


class Runs:
    """A replica's interface to the activation store."""

    def __init__(self, options: Options, model: Model, token_texts: TokenTexts, store: Any, pool: Executor) -> None:
        """`store` is the actor that takes this node's runs, `pool` converts rows outside the event loop."""
        self._options = options
        self._model = model
        self._token_texts = token_texts
        self._store = store
        self._calls = RunCalls(store)
        self._pool = pool
        # A lookup takes two milliseconds.
        self._versions = {"vitrine": __version__} | {name: importlib.metadata.version(name) for name in PACKAGES}

    def check(self, requests: Sequence[Request]) -> None:
        """Reject requests that could record more than the operator's limits.

        Args:
            requests: All choices of one job, which have the same capture.

        Raises:
            RequestError: They could exceed the limit of bytes, or an inline answer that of numbers.
        """
        capture, points = requests[0].capture, requests[0].points
        if capture is None:
            return
        rows = [recordable(request) for request in requests]
        if any(isinstance(positions, tuple) for positions in rows) and (
            grown := next((point.name for point in points if point.place.grows), None)
        ):
            message = f"{grown}: attention patterns need consecutive tokens: choose a range"
            raise RequestError(message, "capture.tokens")
        sizes, numbers = RowSizes.bytes(capture, points), RowSizes.numbers(capture, points)
        size, limit = sum(map(sizes.of, rows)), self._options.max_capture_bytes
        if size > limit:
            message = f"up to {size} bytes would be recorded; the limit is {limit}: capture less, or set max_tokens"
            raise RequestError(message, "capture", "capture_too_large")
        lengths = [len(request.prompt) + request.max_tokens for request in requests]
        held = max(map(sizes.until_end, map(chosen_tokens, requests), lengths))
        limit = self._options.capture_memory_bytes // 2
        if held > limit:
            message = (
                f"the last tokens' rows take {held} bytes, but only {limit} can be held until the end: "
                "record fewer, or all tokens"
            )
            raise RequestError(message, "capture.tokens", "capture_too_large")
        count = sum(map(numbers.of, rows))
        if capture.destination == "inline" and count > MOST_INLINE_VALUES:
            message = (
                f"up to {count} numbers would be returned inline; the limit is {MOST_INLINE_VALUES}: capture "
                "less, or return by reference"
            )
            raise RequestError(message, "capture.return", "capture_too_large")

    async def check_room(self, job: Job, requests: Sequence[Request]) -> None:
        """Reject a job in advance if it requires its activations and the store cannot take them now.

        Raises:
            RequestError: The store has no room, with the reason, or does not answer.
        """
        capture, points = requests[0].capture, requests[0].points
        if capture is None or not capture.required or capture.destination == "inline":
            return
        size = sum(map(RowSizes.bytes(capture, points).of, map(recordable, requests)))
        try:
            async with asyncio.timeout(ROOM_S):
                await self._store.check_room.remote(job.session, size)
        except (StoreError, RayError, TimeoutError) as error:
            reason = str(getattr(error, "cause", None) or error) or f"the store does not answer within {ROOM_S:g} s"
            message = f"the activations cannot be stored now: {reason}"
            raise RequestError(message, "capture.required", "store_unavailable", 503) from error

    def open(self, job: Job, request: Request, index: int, layout: Layout) -> RunWriter:
        """Open the run of a job's choice; it takes rows as they arrive."""
        return RunWriter(self, job, request, index, TextOffsets(self._token_texts), layout)

    async def append(self, run: RunWriter, captured: Captured, part: int) -> None:
        """Send rows of an unfinished run; they no longer need memory here when this returns.

        Raises:
            StoreError: The store cannot take them; or its errors over Ray.
        """
        batch = await self._to_send(run, captured)
        await self._store.append.remote(run.job.session, run.id, part, [batch], run.most)

    async def write(self, run: RunWriter, event: Finished, parts: int) -> RunLocation:
        """Send a run's last rows; they are durable when this returns.

        Raises:
            StoreError: The store cannot take them; or its errors over Ray.
        """
        assert event.captured is not None
        batches = [await self._to_send(run, event.captured)] if event.captured.positions else []
        return await self._calls.write(RunEnd(self._facts(run, event), batches, parts))

    def abandon(self, run: RunWriter) -> None:
        """Discard an unfinished run from the store."""
        self._store.abandon.remote(run.job.session, run.id)

    async def _to_send(self, run: RunWriter, captured: Captured) -> Any:
        """Call `_lay_out` outside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._lay_out, run, captured)

    def _lay_out(self, run: RunWriter, captured: Captured) -> Any:
        """Rows as a record batch, or a reference to one in Ray's object store.

        Small batches go without a reference: an object costs the replica, Ray and the store 3 ms of processor time.
        """
        job, request = run.job, run.request
        assert job.capture is not None
        segment = FileInfo(
            session_id=job.session_id,
            model=self._options.served_name,
            revision=self._options.revision,
            quantization=self._model.quantization,
            dtype=dtype_name(self._model.dtype),
            architecture=type(self._model.hf).__name__,
            versions=self._versions,
            modules={point.name: point.module for point in request.points},
            layers=self._model.points.layer_count,
            adapter=self._options.adapter,
            adapter_revision=self._model.adapter_revision,
        )
        batch = to_batch(
            segment,
            run_id=run.id,
            sample_id=run.sample_id,
            positions=captured.positions,
            token_ids=captured.token_ids,
            prompt_tokens=len(request.prompt),
            points=captured.values,
            **run.columns(captured),
        )
        if batch.nbytes > PACKED_BYTES:
            return ray.put(batch)
        packed = Packed(batch)
        return packed if packed.nbytes < INLINE_BYTES else ray.put(packed)

    def _facts(self, run: RunWriter, event: Finished) -> RunInfo:
        job, request = run.job, run.request
        assert job.capture is not None
        spoken = json.dumps(run.asked, sort_keys=True, default=list)
        return RunInfo(
            run_id=run.id,
            session_id=job.session_id,
            model=self._options.served_name,
            created=run.created,
            prompt_tokens=len(event.prompt),
            tokens=len(event.prompt) + len(event.tokens),
            owner=job.account.owner,
            sample_id=run.sample_id,
            tags=run.tags | {f"monitor.{one.name}": "fired" for one in event.monitored if one.fired is not None},
            sampling={**asdict(request.sampling), "max_tokens": request.max_tokens},
            finish_reason=event.reason,
            request_id=job.request_id or job.id,
            messages_hash=hashlib.sha256(spoken.encode()).hexdigest(),
            interventions=as_sent(job.changes(run.number).values()),
            logit_lens=job.logit_lens.model_dump(mode="json", by_alias=True, exclude_unset=True)
            if job.logit_lens
            else None,
            text=run.text(event) if job.capture.store_text else None,
            batch_invariant=self._model.batch_invariant,
        )


class _Waiting(NamedTuple):
    end: RunEnd
    stored: asyncio.Future[RunLocation]


class RunCalls:
    """Sends ends of runs to the store.

    A call costs the replica, Ray and the store 3 ms of processor time, and many runs may end in one step.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self._waiting: list[_Waiting] = []
        self._tasks: set[asyncio.Task[None]] = set()  # asyncio itself does not keep them
        self._senders = 0

    async def write(self, end: RunEnd) -> RunLocation:
        """Send a run's end; it is durable when this returns.

        Raises:
            StoreError: The store cannot take it; or its errors over Ray.
        """
        waiting = _Waiting(end, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        if self._senders < CALLS:
            self._senders += 1
            self._started(self._send())
        return await waiting.stored

    def _started(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _send(self) -> None:
        """Send what waits, one call after another, unless a call takes long."""
        try:
            while self._waiting:
                together, self._waiting = self._waiting[:MOST_RUNS], self._waiting[MOST_RUNS:]
                await asyncio.wait({self._started(self._call(together))}, timeout=PATIENCE_S)
        finally:
            self._senders -= 1

    async def _call(self, together: Sequence[_Waiting]) -> None:
        results: list[RunLocation | Exception]
        try:
            results = await self._store.write_all.remote([waiting.end for waiting in together])
        except Exception as error:  # noqa: BLE001 - each run raises it
            results = [error] * len(together)
        for waiting, result in zip(together, results, strict=True):
            if waiting.stored.done():  # its request was cancelled
                continue
            if isinstance(result, Exception):
                waiting.stored.set_exception(result)
            else:
                waiting.stored.set_result(result)
