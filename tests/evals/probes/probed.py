"""Sessions of made runs in a store's own files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from deployments.activations.facts import FileInfo, RunInfo
from deployments.activations.index.index import Index
from deployments.activations.segments.columns import to_batch
from deployments.activations.writer.writer import Writer

MODEL = "fake/model"


@dataclass
class Made:
    """A run of some tokens; `rows` is by point `[stored tokens, hidden]`, from token `first` on, else of the last."""

    run_id: str
    rows: dict[str, torch.Tensor]
    tags: dict[str, str] = field(default_factory=dict)
    words: Sequence[str] = ("one", " two", " three")
    prompt_tokens: int = 3
    sample_id: str | None = None
    model: str = MODEL
    text: bool = True
    first: int | None = None
    revision: str | None = None
    roles: Sequence[int] | None = None
    turns: Sequence[int] | None = None


def store(directory: Path, session: str, runs: Sequence[Made]) -> Path:
    """Write a session as the server does."""
    directory.mkdir(exist_ok=True)
    writer = Writer(directory, Index.scanned(directory))
    try:
        for made in runs:
            stored = len(next(iter(made.rows.values())))
            first = len(made.words) - stored if made.first is None else made.first
            rows = slice(first, first + stored)
            begins = np.cumsum([0, *(len(word) for word in made.words)])[:-1]
            points = {name: name for name in made.rows}
            segment = FileInfo(session, made.model, made.revision, "LlamaForCausalLM", {"torch": "2"}, points)
            batch = to_batch(
                segment,
                run_id=made.run_id,
                sample_id=made.sample_id,
                positions=list(range(len(made.words))[rows]),
                token_ids=[hash(word) % 1000 for word in made.words[rows]],
                prompt_tokens=made.prompt_tokens,
                points=made.rows,
                text_offsets=begins[rows].tolist(),
                roles=made.roles,
                turns=made.turns,
            )
            facts = RunInfo(
                made.run_id,
                session,
                made.model,
                created=1.0,
                prompt_tokens=made.prompt_tokens,
                tokens=len(made.words),
                sample_id=made.sample_id,
                tags=made.tags,
                text="".join(made.words) if made.text else None,
            )
            future = writer.submit(facts, [batch])
        future.result()
    finally:
        writer.close()
    return directory


def statements(
    groups: int = 40,
    each: int = 4,
    hidden: int = 24,
    layers: int = 3,
    planted: int | None = 1,
    strength: float = 1.5,
    seed: int = 0,
    tokens: int = 1,
) -> list[Made]:
    """Groups of true and false statements; at the layer `planted` a direction of length `strength` tells them apart.

    Every word is equally often true and false, and each group moves all features of its runs.
    """
    random = torch.Generator().manual_seed(seed)
    runs = []
    for group in range(groups):
        shift = torch.randn(hidden, generator=random)
        for i in range(each):
            label = i % 2 == 0
            rows = {}
            for layer in range(layers):
                values = torch.randn(tokens, hidden, generator=random) + shift
                if layer == planted:
                    values[:, 0] = torch.randn(tokens, generator=random) + strength * (label - 0.5)
                rows[f"layers.{layer}.output"] = values
            tags = {"label": "true" if label else "false", "group": f"g{group}"}
            words = (f"A{group}", " statement", f" about{i // 2}")  # another prompt in each group
            runs.append(Made(f"run-{group}-{i}", rows, tags, words, sample_id=f"s{group}-{i}"))
    return runs
