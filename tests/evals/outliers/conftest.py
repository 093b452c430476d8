from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path

import pytest
import torch

from deployments.activations.facts import FileInfo, RunInfo
from deployments.activations.index.index import Index
from deployments.activations.segments.columns import to_batch
from deployments.activations.writer.writer import Writer


def _record(store: Path, runs: Mapping[str, Mapping[str, torch.Tensor]], *, model: str = "model", **facts: str) -> None:
    """Stores runs of the session `s`, `[tokens, features]` by point; token k of a run is k + 100 and reads `<k>`."""
    with closing(Writer(store, Index.scanned(store))) as writer:
        for run_id, points in runs.items():
            rows = len(next(iter(points.values())))
            segment = FileInfo("s", model, None, "Any", {}, {name: f"model.{name}" for name in points})
            batch = to_batch(
                segment,
                run_id=run_id,
                sample_id=None,
                positions=range(rows),
                token_ids=range(100, 100 + rows),
                prompt_tokens=rows - 1,
                points=points,
                text_offsets=[3 * row for row in range(rows)],
            )
            run = RunInfo(run_id, "s", model, created=1.0, prompt_tokens=rows - 1, tokens=rows, **facts)
            writer.submit(run, [batch]).result()


@pytest.fixture(scope="session")
def record() -> Callable[..., None]:
    return _record
