"""What becomes of a finished request's activations: stored, given inline, or failed with a reason."""

from __future__ import annotations

import asyncio
import hashlib
import importlib.metadata
import json
import logging
import math
import time
from concurrent.futures import Executor
from dataclasses import asdict, replace
from typing import Any

import ray
from ray.exceptions import RayError

from deployments.activations.facts import RunFacts, ShardFacts, StoredRun, StoreError
from deployments.activations.schema import to_batch
from deployments.activations.spec import Capture
from deployments.engine.model import Model
from deployments.engine.request import Finished, Request
from deployments.errors import RequestError
from deployments.messages import Job, RunReport
from deployments.options import Options

logger = logging.getLogger("ray.serve")


class Runs:
    """A replica's way to the activation store."""

    def __init__(self, options: Options, model: Model, store: Any, pool: Executor) -> None:
        """Take what every run is described by.

        Args:
            options: The operator's.
            model: The model that is recorded.
            store: The activation store's handle.
            pool: Where rows are laid out, off the event loop.
        """
        self._options = options
        self._model = model
        self._store = store
        self._pool = pool

    def check(self, request: Request) -> None:
        """Refuse what could record more than the operator's limits.

        Raises:
            RequestError: It could hold more bytes, or an inline answer more numbers.
        """
        capture = request.capture
        if capture is None:
            return
        rows = _most_rows(capture, len(request.prompt), request.max_tokens)
        features = capture.features
        kept = (features.first or len(features.index or ())) if features else None
        values = {point: rows * math.prod(point.shape[:-1]) * (kept or point.shape[-1]) for point in request.points}
        size, limit = (
            sum(n * point.place.dtype.itemsize for point, n in values.items()),
            self._options.max_capture_bytes,
        )
        if size > limit:
            message = f"up to {size} bytes would be recorded, the limit is {limit}: capture less, or set max_tokens"
            raise RequestError(message, "capture", "capture_too_large")
        count, limit = sum(values.values()), self._options.max_inline_values
        if capture.destination == "inline" and count > limit:
            message = f"up to {count} numbers would come inline, the limit is {limit}: capture less, or by reference"
            raise RequestError(message, "capture.return", "capture_too_large")

    async def report(self, job: Job, request: Request, event: Finished) -> RunReport:
        """Store what was recorded and say where it lies; durable when it answers."""
        assert job.capture is not None
        tokens = len(event.prompt) + len(event.tokens)
        report = RunReport(_run_id(request), job.session_id, "failed", tokens, len(event.prompt))
        if event.captured is None or event.error:
            return replace(report, reason=event.error or "nothing was recorded")
        if not event.captured.positions:
            return replace(report, reason="no token was generated, and only those were asked for")
        if job.capture.destination == "inline":
            return replace(report, status="inline", points=_inline(job, event))
        try:
            loop = asyncio.get_running_loop()
            facts, batch = await loop.run_in_executor(self._pool, self._lay_out, job, request, event)
            stored: StoredRun = await self._store.write.remote(facts, [batch])
        except (StoreError, RayError, ValueError) as error:
            # The completion is worth having without them; the answer says what happened.
            logger.warning("run %s was not stored: %s", report.run_id, error)
            return replace(report, reason=str(getattr(error, "cause", None) or error))
        return replace(report, status="stored", points={name: p._asdict() for name, p in stored.points.items()})

    def _lay_out(self, job: Job, request: Request, event: Finished) -> tuple[RunFacts, Any]:
        """A run's facts and a reference to its rows in the object store."""
        assert event.captured is not None
        assert job.capture is not None
        sequence = [*event.prompt, *event.tokens]
        shard = ShardFacts(
            session_id=job.session_id,
            model=self._options.served_name,
            revision=self._options.revision,
            architecture=type(self._model.hf).__name__,
            versions={name: importlib.metadata.version(name) for name in ("torch", "transformers", "nnsight")},
            modules={point.name: point.module for point in request.points},
        )
        spoken = json.dumps(job.messages if job.messages is not None else job.prompts, sort_keys=True)
        facts = RunFacts(
            run_id=_run_id(request),
            session_id=job.session_id,
            model=self._options.served_name,
            created=time.time(),
            prompt_tokens=len(event.prompt),
            tokens=len(sequence),
            sample_id=job.capture.sample_id,
            tags=dict(job.capture.tags),
            sampling={**asdict(request.sampling), "max_tokens": request.max_tokens},
            finish_reason=event.reason,
            request_id=job.id,
            messages_hash=hashlib.sha256(spoken.encode()).hexdigest(),
        )
        positions = event.captured.positions
        batch = to_batch(
            shard,
            run_id=_run_id(request),
            sample_id=job.capture.sample_id,
            positions=positions,
            token_ids=sequence[positions.start : positions.stop],
            prompt_tokens=len(event.prompt),
            points=event.captured.values,
        )
        return facts, ray.put(batch)


def _most_rows(capture: Capture, prompt: int, new: int) -> int:
    """The most rows a request can record."""
    rows = {"prompt": prompt, "generated": new}.get(str(capture.tokens), prompt + new)
    return min(rows, capture.tail or rows)


def _run_id(request: Request) -> str:
    return f"run-{request.id}"


def _inline(job: Job, event: Finished) -> dict[str, dict[str, Any]]:
    assert job.capture is not None
    assert event.captured is not None
    features = job.capture.features
    info = "all_features" if features is None else f"first_{features.first}_features"
    if features and features.index:
        info = f"{len(features.index)}_listed_features"
    return {
        name: {
            "format": "sampled_tensor",
            "shape": list(value.shape),
            "dtype": str(value.dtype).removeprefix("torch."),
            "data": value.float().tolist(),
            "sample_info": info,
        }
        for name, value in event.captured.values.items()
    }
