"""Names of points and dtypes as text: TransformerLens' names, wildcards, negative layers. Needs no model or file."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Sequence

from vitrine.points import TRANSFORMER_LENS, canonical, matching

__all__ = ["COLUMNS", "canonical", "dtype_name", "hooks_like", "matching", "nearest", "recorded", "some"]

# The columns of stored rows beside the points: no point has such a name.
COLUMNS = ("run_id", "sample_id", "position", "phase", "token_id", "text_offset", "role", "turn")
MOST_NAMED = 10  # names in a message


def recorded(patterns: Iterable[str], names: Collection[str], layers: int | None = None) -> list[str]:
    """The recorded points that match names or patterns, each once, in the order of the patterns.

    Args:
        patterns: Names, in which `*` matches one part, and a negative layer counts from the model's last.
        names: The recorded points.
        layers: The model's number of layers; None if unknown.

    Raises:
        ValueError: A pattern matches none of them, with the nearest names; or has a negative layer without `layers`.
    """
    points: dict[str, None] = {}
    for pattern in patterns:
        if not (meant := matching(pattern, names, layers)):
            raise ValueError(f"{pattern} was not recorded; there is {nearest(pattern, names)}")
        points |= dict.fromkeys(meant)
    return list(points)


def hooks_like(name: str) -> list[str]:
    """For an unknown name in TransformerLens' form, the nearest known one of the same layer."""
    match = re.fullmatch(r"((?:blocks|layers)\.(?:\*|-?\d+)\.(?:attn\.)?(?:hook_)?)(\w+)", name)
    close = difflib.get_close_matches(match[2], TRANSFORMER_LENS, 3) if match else []
    return [f"{match[1]}{hook}" for hook in close if match]


def nearest(pattern: str, names: Collection[str]) -> str:
    """Some of the names for a message, the most similar first."""
    close = difflib.get_close_matches(canonical(pattern), names, n=3, cutoff=0.6)
    others = sorted((name for name in names if name not in close), key=_numbered)
    return some([*close, *others])


def some(names: Sequence[str]) -> str:
    """The first names for a message."""
    return (", ".join(names[:MOST_NAMED]) + (", ..." if len(names) > MOST_NAMED else "")) or "none"


def _numbered(name: str) -> list[tuple[int, str]]:
    """A key that sorts layers by their numbers."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split(".")]


def dtype_name(dtype: object) -> str:
    """A torch dtype's name in files and answers: `bfloat16`."""
    return str(dtype).removeprefix("torch.")
