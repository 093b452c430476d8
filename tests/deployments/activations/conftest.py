"""Makers of runs and stores that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
import torch

from deployments.activations.catalogue import Catalogue
from deployments.activations.facts import RunFacts, ShardFacts
from deployments.activations.schema import to_batch
from deployments.activations.writer import Writer


class Made(NamedTuple):
    facts: RunFacts
    batches: list[pa.RecordBatch]
    points: dict[str, torch.Tensor]


def _make(
    run_id: str,
    points: dict[str, torch.Tensor] | None = None,
    *,
    session_id: str = "session",
    parts: int = 1,
    **facts: Any,
) -> Made:
    """A run whose last row is generated, of small float32 activations unless `points` says otherwise."""
    points = points or {"layers.0.output": torch.randn(3, 4)}
    rows = len(next(iter(points.values())))
    shard = ShardFacts(session_id, "model", None, "Qwen3ForCausalLM", {"torch": "2"}, {n: n for n in points})
    batches = [
        to_batch(
            shard,
            run_id=run_id,
            sample_id=facts.get("sample_id"),
            positions=index.tolist(),
            token_ids=(index + 100).tolist(),
            prompt_tokens=rows - 1,
            points={name: tensor[index[0] : index[-1] + 1] for name, tensor in points.items()},
        )
        for index in torch.arange(rows).tensor_split(parts)
    ]
    given = {"created": 1.0, "prompt_tokens": rows - 1, "tokens": rows, **facts}
    return Made(RunFacts(run_id, session_id, "model", **given), batches, points)


@pytest.fixture(scope="session")
def make() -> Callable[..., Made]:
    return _make


@pytest.fixture
def open_writer(tmp_path: Path) -> Iterator[Callable[..., Writer]]:
    """Opens writers on `tmp_path`, each with a catalogue rebuilt from the files; closes them at the end."""
    writers: list[Writer] = []

    def opened(**options: int) -> Writer:
        writers.append(Writer(tmp_path, Catalogue.rebuild(tmp_path), **options))
        return writers[-1]

    yield opened
    for writer in writers:
        writer.close()
