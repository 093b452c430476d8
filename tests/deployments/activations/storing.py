"""Stores runs in files, as the store does."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

from deployments.activations.index.index import Index
from deployments.activations.writer.writer import Writer


def store(root: Path, *made: Any, **options: Any) -> list[Path]:
    """Store runs below a directory, and seal their files; gives all files there are."""
    root.mkdir(exist_ok=True)
    with closing(Index.open(root)) as index:
        writer = Writer(root, index, **options)
        for one in made:
            writer.submit(one.facts, one.batches).result()
        writer.close()
    return sorted(root.glob("*/*/*.arrow"))
