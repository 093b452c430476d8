"""`activations_meta`, the part of an answer that says what became of its activations, as any server may write it."""

from math import prod
from typing import Any

ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "uint8": 1}

Record = dict[str, Any]


def why_not_stored(meta: Record | None) -> str | None:
    """Why an answer that was to be recorded is not known to be; None where its server says that it is stored.

    `stored` and `failed` are final. Of another status no more is known than that word.
    """
    if meta is None:
        return "the answer has no activations_meta"
    status, reason = meta.get("status"), meta.get("reason")
    if status == "stored":
        return None if runs_of(meta) else "the answer says 'stored' and names no run"
    if status == "failed":
        return str(reason or "the server gives no reason")
    return f"the answer says {status!r}" + (f": {reason}" if reason else "")


def is_lost(meta: Record | None) -> bool:
    """Whether an answer says that storing failed: asked again, it may be stored."""
    return meta is not None and meta.get("status") == "failed"


def runs_of(meta: Record) -> list[Record]:
    """The runs that an answer names, whether they are stored or not."""
    runs = meta.get("runs")
    named = [run for run in runs if isinstance(run, dict)] if isinstance(runs, list) else []
    return [run for run in named if isinstance(run.get("run_id"), str)]


def tokens_of(run: Record) -> int:
    """Tokens of a run, prompt and generated; 0 where the server does not say it."""
    tokens = run.get("tokens")
    return tokens if isinstance(tokens, int) else 0


def points_of(run: Record) -> dict[str, Record]:
    """Where the points of a run lie, by their names."""
    points = run.get("points")
    return {name: at for name, at in points.items() if isinstance(at, dict)} if isinstance(points, dict) else {}


def bytes_of(at: Record) -> int | None:
    """Bytes of a point's values; None where its dtype and shape do not say it, as of attention patterns."""
    shape, size = at.get("shape"), ITEM_BYTES.get(str(at.get("dtype")))
    if size is None or not isinstance(shape, list) or not shape or not all(type(n) is int and n >= 0 for n in shape):
        return None
    return size * prod(shape)
