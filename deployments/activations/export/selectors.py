"""What is downloaded of a store, as whoever asks names it. Needs no Arrow."""

from __future__ import annotations

from typing import NamedTuple

from deployments.errors import RequestError

IDLE_S = 60.0  # after which the plan of a download is dropped that no page is asked of: it keeps deleted files on disk


class Choice(NamedTuple):
    """Stored runs as a file: these alone, these points alone, where any are named."""

    session_id: str
    runs: tuple[str, ...] | None = None
    points: tuple[str, ...] | None = None
    format: str = "arrow"  # or `safetensors`, `npz` or `pt`


class Found(NamedTuple):
    """A download: a tag that changes when its bytes would, and how many they are."""

    tag: str
    length: int


def changed() -> RequestError:
    """What refuses a page of something else than the pages before it: 412."""
    message = "it changed since its first page: begin again without If-Match; named runs change only when they move"
    return RequestError(message, "If-Match", "download_changed", 412)


def gone(file: object, field: str | None = None) -> RequestError:
    """What refuses to read a run whose file was taken away, though nobody deleted the run: 410."""
    return RequestError(f"the file {file} of stored runs is gone, and what was in it", field, "file_gone", 410)
