"""The engine's statistics as metrics of Ray's, which every node exports for Prometheus."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from ray.util.metrics import Counter, Gauge

if TYPE_CHECKING:  # the controller and the proxies import the replica's module, and need no torch
    from deployments.engine.statistics import Statistics

PREFIX = "vitrine_"
GAUGES = {
    "running": "Requests that hold a slot.",
    "waiting": "Requests that wait for a slot.",
    "slots": "Slots there is KV memory for.",
    "kv_bytes": "KV memory held.",
    "kv_budget_bytes": "The most KV memory that will be held.",
    "capture_bytes": "Recorded rows in host memory.",
    "step_seconds": "How long a forward takes, a mean of the latest.",
    "tokens_per_second": "Tokens generated per second in the latest steps.",
}
COUNTERS = {
    "steps": "Forwards.",
    "tokens": "Tokens generated.",
    "preempted": "Requests that lost their slot and were run again.",
    "out_of_memory": "Forwards that found no memory.",
}


class Metrics:
    """One replica's metrics; Ray adds which replica it is."""

    def __init__(self, model: str) -> None:
        """Begin at nothing.

        Args:
            model: The name it is served by, which every metric carries.
        """
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
        """Say what the engine says now."""
        numbers = asdict(statistics)
        for name, gauge in self._gauges.items():
            gauge.set(numbers[name])
        for name, counter in self._counters.items():
            if more := numbers[name] - self._counted[name]:
                counter.inc(more)
                self._counted[name] = numbers[name]
