"""Which stored runs are asked for, in plain types that import neither torch nor Arrow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Filter(NamedTuple):
    """Runs that all of this holds for; what is left out holds for every run."""

    session: str | None = None
    model: str | None = None
    since: float | None = None  # Unix seconds; the run was created then or later
    until: float | None = None  # Unix seconds; the run was created before
    sample_id: str | None = None  # the user's name for the sample
    tags: tuple[tuple[str, str], ...] = ()  # names and values that the run's tags hold, each of them
    among: tuple[str, ...] | None = None  # the run's session is one of these; None where it may be any
    without: tuple[str, ...] = ()  # it is none of these
    runs: tuple[str, ...] | None = None  # the run is one of these; None where it may be any


EVERYTHING = Filter()


def tag_pairs(texts: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Tags written as `name=value`; the name ends at the first `=`.

    Raises:
        ValueError: One has no name or no `=`.
    """
    pairs = [text.partition("=") for text in texts]
    if (wrong := next(("".join(pair) for pair in pairs if not (pair[0] and pair[1])), None)) is not None:
        raise ValueError(f"tag {wrong[:140]!r} must be name=value")
    return tuple((name, value) for name, _, value in pairs)
