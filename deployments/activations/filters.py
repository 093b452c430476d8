"""Filters for listing stored runs and choices of what to download. Imports neither torch nor Arrow."""

from __future__ import annotations

from typing import NamedTuple

from deployments.errors import RequestError

IDLE_S = 60.0  # without a request, after which a download's plan is dropped: it keeps deleted files on disk


class Filter(NamedTuple):
    """Runs that all of this holds for; what is left out holds for every run."""

    session: str | None = None
    model: str | None = None
    since: float | None = None  # Unix seconds; the run was created then or later
    until: float | None = None  # Unix seconds; the run was created before
    sample_id: str | None = None  # the user's name for the sample
    tags: tuple[tuple[str, str], ...] = ()  # names and values that the run's tags hold, each of them
    among: tuple[str, ...] | None = None  # the run's session is one of these; None where it may be any
    runs: tuple[str, ...] | None = None  # the run is one of these; None where it may be any


EVERYTHING = Filter()


class Choice(NamedTuple):
    """Stored runs as a file: these alone, these points alone, where any are named."""

    session_id: str
    runs: tuple[str, ...] | None = None
    points: tuple[str, ...] | None = None
    format: str = "arrow"  # or `safetensors`, `npz` or `pt`


class DownloadInfo(NamedTuple):
    """A download: a tag that changes when its bytes would, and how many they are."""

    tag: str
    length: int


def download_changed() -> RequestError:
    """The error 412 for a page of a download that changed since its first page."""
    message = "it changed since its first page: begin again without If-Match; named runs change only if files move"
    return RequestError(message, "If-Match", "download_changed", 412)


def file_gone(file: object, field: str | None = None) -> RequestError:
    """The error 410 for a run whose file was removed although the run was not deleted."""
    return RequestError(f"the file {file} of stored runs was removed, and its runs with it", field, "file_gone", 410)
