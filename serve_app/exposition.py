"""Prometheus text of several nodes as one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

OURS = ("ray_vitrine_", "ray_serve_")


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterator[Metric]:
        return iter(self._families)


def merge(texts: Iterable[str]) -> str:
    """One text with each metric's head once, of this project's metrics and Serve's own.

    Args:
        texts: What each node's exporter says.
    """
    families: dict[str, Metric] = {}
    for text in texts:
        for family in text_string_to_metric_families(text):
            if family.name.startswith(OURS):
                families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                families[family.name].samples += family.samples
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(families.values()))
    return generate_latest(registry).decode()
