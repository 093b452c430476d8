"""Readout values and reports of interventions as fields of answers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from deployments.messages import End, ReadoutValues


def of_readouts(parts: Iterable[ReadoutValues]) -> dict[str, Any]:
    """The fields of a choice or a chunk for readouts; empty if there are none.

    `first` is the index, within its phase, of the first token with values; if the tokens are not consecutive, `index`
    lists them. A value that is not finite is null.
    """
    found: dict[str, Any] = {}
    for part in parts:
        one = found.setdefault(part.name, {"labels": list(part.labels)} if part.labels else {})
        began = {"first": part.index[0], "index": [], "values": []}
        phase = one.setdefault("generated" if part.generated else "prompt", began)
        phase["index"] += part.index
        phase["values"] += _rows(part)
    for one in found.values():
        for phase in (one[name] for name in ("prompt", "generated") if name in one):
            index = phase["index"]
            if index == list(range(index[0], index[0] + len(index))):
                del phase["index"]
    return {"readouts": found} if found else {}


def _rows(part: ReadoutValues) -> list[Any]:
    if part.features is None:
        return [[_finite(value) for value in row] for row in part.values]
    pairs = zip(part.features, part.values, strict=True)
    return [
        [{"feature": feature, "value": _finite(value)} for feature, value in zip(features, row, strict=True) if value]
        for features, row in pairs
    ]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def of_edits(end: End) -> dict[str, Any]:
    """The fields of a choice for gated or reported interventions, and for the row that ended the answer."""
    said: dict[str, Any] = {}
    if end.edits:
        said["report"] = [
            {name: value for name, value in one._asdict().items() if value is not None} for one in end.edits
        ]
    if end.stop_reason:
        said["stop_reason"] = end.stop_reason._asdict() | {"value": _finite(end.stop_reason.value)}
    return said
