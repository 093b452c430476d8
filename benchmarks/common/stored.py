"""Rows of runs that no model has made, for benchmarks of the activation store."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa
import torch

from deployments.activations.facts import RunFacts, SegmentFacts
from deployments.activations.segments.columns import to_batch

MODEL = "measured"


def rows(session: str, points: Mapping[str, torch.Tensor], run_id: str = "r", first: int = 0) -> pa.RecordBatch:
    """Points' values, each [tokens, ...], of prompt tokens from position `first` on, as the writer takes them."""
    count = len(next(iter(points.values())))
    positions = range(first, first + count)
    return to_batch(
        SegmentFacts(session, MODEL, None, MODEL, {}, {name: name for name in points}),
        run_id=run_id,
        sample_id=None,
        positions=positions,
        token_ids=positions,
        prompt_tokens=first + count,
        points=points,
    )


def facts(session: str, run_id: str, tokens: int) -> RunFacts:
    """The facts of a run whose tokens are all of its prompt."""
    return RunFacts(run_id, session, MODEL, 0.0, tokens, tokens)
