"""Prometheus metrics, exported by Ray on every node: the engine's statistics, and figures of each request.

Serve itself counts requests by route and status.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING

from ray.util.metrics import Counter, Gauge, Histogram

from deployments.job import Job
from deployments.messages import End, Refusal

if TYPE_CHECKING:  # the controller and the proxies import the replica's module without torch
    from deployments.engine.statistics import Statistics

PREFIX = "vitrine_"
GAUGES = {
    "running": "Requests under way.",
    "waiting": "Requests that wait.",
    "kv_bytes": "KV memory in use, what is kept for later prompts included.",
    "kv_budget_bytes": "The most KV memory that will be held.",
    "capture_bytes": "Recorded rows in host memory.",
    "step_seconds": "How long a forward takes, a mean of the latest.",
    "tokens_per_second": "Tokens generated per second in the latest steps.",
}
COUNTERS = {
    "steps": "Forwards.",
    "tokens": "Tokens generated.",
    "preempted": "Requests that lost their pages and were run again.",
    "cached_tokens": "Prompt tokens reused from an earlier request with the same prefix.",
    "out_of_memory": "Forwards that found no memory.",
}


class EngineMetrics:
    """One replica's engine metrics; Ray adds the replica's id."""

    def __init__(self, model: str) -> None:
        """Start at 0; `model` is the served name, a label of every metric."""
        tags = {"model": model}
        keys = tuple(tags)
        self._gauges = {name: Gauge(PREFIX + name, text, tag_keys=keys) for name, text in GAUGES.items()}
        self._counters = {
            name: Counter(f"{PREFIX}{name}_total", text, tag_keys=keys) for name, text in COUNTERS.items()
        }
        for metric in (*self._gauges.values(), *self._counters.values()):
            metric.set_default_tags(tags)
        self._counted = dict.fromkeys(COUNTERS, 0)

    def update(self, statistics: Statistics) -> None:
        """Set the metrics to the engine's statistics."""
        numbers = asdict(statistics)
        for name, gauge in self._gauges.items():
            gauge.set(numbers[name])
        for name, counter in self._counters.items():
            if more := numbers[name] - self._counted[name]:
                counter.inc(more)
                self._counted[name] = numbers[name]


BUCKETS = [0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600]
TAGS = ("model", "route")


class RequestMeter:
    """The outcome of one request.

    Attributes:
        status: The HTTP status of the answer; 499 if the client disconnected.
        prompt_tokens: Tokens of its prompts, each counted once.
        first_s: Seconds until the first message; None before.
        runs: The status of each of its choices' runs.
    """

    def __init__(self, job: Job) -> None:
        self.status = 499
        self.prompt_tokens = 0
        self.first_s: float | None = None
        self.runs: list[str] = []
        self._job = job
        self._left = max(1, len(job.prompts)) * job.n
        self.began = time.monotonic()

    def first(self) -> None:
        """Record the time of the first messages."""
        self.first_s = time.monotonic() - self.began

    def last(self, messages: Sequence[End | Refusal]) -> None:
        """Record the end of choices or of the whole request."""
        for message in messages:
            if isinstance(message, Refusal):
                self.status = message.status
                return
            self._left -= 1
            if message.run:
                self.runs.append(message.run.status)
            if message.index % self._job.n == 0:
                self.prompt_tokens += message.prompt_tokens
        if not self._left:
            self.status = 200


class RequestMetrics:
    """Metrics of one replica's requests; they cost nothing per token."""

    def __init__(self, model: str) -> None:
        """Start at 0; `model` is the served name, a label of every metric."""
        self._requests = Counter(
            f"{PREFIX}requests_total", "Requests that replicas took, by their end.", tag_keys=(*TAGS, "status")
        )
        self._seconds = Histogram(f"{PREFIX}request_seconds", "How long they took.", BUCKETS, tag_keys=TAGS)
        self._first = Histogram(f"{PREFIX}first_token_seconds", "Until a stream's first text.", BUCKETS, tag_keys=TAGS)
        self._prompt = Counter(f"{PREFIX}prompt_tokens_total", "Tokens of prompts.", tag_keys=TAGS)
        self._runs = Counter(f"{PREFIX}runs_total", "Recorded runs, by their end.", tag_keys=("model", "status"))
        for metric in (self._requests, self._seconds, self._first, self._prompt, self._runs):
            metric.set_default_tags({"model": model})

    @contextmanager
    def measure(self, job: Job, streamed: bool) -> Iterator[RequestMeter]:
        """Count one request when the block ends, for any reason."""
        meter = RequestMeter(job)
        try:
            yield meter
        except Exception:  # count any failure, then re-raise
            meter.status = 500
            raise
        finally:
            tags = {"route": "/v1/completions" if job.messages is None else "/v1/chat/completions"}
            self._requests.inc(1, tags | {"status": str(meter.status)})
            self._seconds.observe(time.monotonic() - meter.began, tags)
            if streamed and meter.first_s is not None:
                self._first.observe(meter.first_s, tags)
            if meter.prompt_tokens:
                self._prompt.inc(meter.prompt_tokens, tags)
            for status in meter.runs:
                self._runs.inc(1, {"status": status})
