"""Filters for listing stored runs, and parts of files. Imports neither torch nor Arrow."""

from __future__ import annotations

from typing import NamedTuple

MOST_BYTES = 4 << 20  # of a file in one answer


class Filter(NamedTuple):
    """Runs that all of this holds for; what is left out holds for every run."""

    session: str | None = None  # the id of the session
    model: str | None = None
    since: float | None = None  # Unix seconds; the run was created then or later
    until: float | None = None  # Unix seconds; the run was created before
    sample_id: str | None = None  # the user's name for the sample
    tags: tuple[tuple[str, str], ...] = ()  # names and values that the run's tags hold, each of them
    runs: tuple[str, ...] | None = None  # the run is one of these
    owner: str | None = None  # the session's; empty for sessions without an owner


EVERYTHING = Filter()


class FilePart(NamedTuple):
    """Bytes of a file from `first` on, and the file's length."""

    data: bytes
    first: int
    length: int
