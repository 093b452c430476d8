"""`activations_meta`, the part of an answer that says what became of its activations, as any server may write it."""

from math import prod
from typing import Any

ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "uint8": 1}

Record = dict[str, Any]
Shape = list[int | None]


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


def shape_of(at: Record) -> Shape:
    """A point's shape: its rows, then those of a row; None is the axis of a pattern, as wide as a token sees.

    Raises:
        ValueError: the server names no such shape.
    """
    shape = at.get("shape")
    if isinstance(shape, list) and shape and shape[0] is not None and shape.count(None) <= 1:
        sizes = [size for size in shape if size is not None]
        if all(type(size) is int and size >= 0 for size in sizes):
            return shape
    raise ValueError(f"the server says that its shape is {shape!r}")


def item_bytes(at: Record) -> int:
    """Bytes of one number of a point.

    Raises:
        ValueError: of its dtype that is not known.
    """
    if (size := ITEM_BYTES.get(str(at.get("dtype")))) is None:
        raise ValueError(f"the size of the dtype {at.get('dtype')!r} is not known")
    return size


def values_of(shape: Shape, seen: int) -> int:
    """How many numbers a point has.

    Args:
        shape: of the point.
        seen: tokens that its last row sees, itself among them; each row before sees one less.
    """
    rows, *features = shape
    assert rows is not None
    if None not in features:
        return prod(size for size in shape if size is not None)
    return (rows * seen - rows * (rows - 1) // 2) * prod(size for size in features if size is not None)
