"""Which stored runs are asked for, in plain types that import neither torch nor Arrow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Filter(NamedTuple):
    """Runs that all of this holds for; what is left out holds for every run.

    Attributes:
        session: The session's id.
        model: The model's id.
        since: Unix seconds; the run was created then or later.
        until: Unix seconds; the run was created before.
        sample_id: The user's name for the sample.
        tags: Names and values that the run's tags hold, each of them.
        among: The run's session is one of these; None where it may be any.
        without: It is none of these.
        runs: The run is one of these; None where it may be any.
    """

    session: str | None = None
    model: str | None = None
    since: float | None = None
    until: float | None = None
    sample_id: str | None = None
    tags: tuple[tuple[str, str], ...] = ()
    among: tuple[str, ...] | None = None
    without: tuple[str, ...] = ()
    runs: tuple[str, ...] | None = None


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
