"""Copies a server's session to a local directory, page by page, for `load` and exports. Needs no torch."""

from __future__ import annotations

import io
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
from tqdm import tqdm

from deployments.activations.facts import check_session_id
from deployments.activations.files.disk import PULLED, held
from deployments.activations.segments import checksums
from deployments.options import fits_header
from deployments.paging import NoPageError, Paging

_TIMEOUT = httpx.Timeout(30, read=330)  # a server may look through a large session first
_BUFFER = 1 << 20
_CHANGED = "the session changed while it was pulled, nothing of it is kept: pull it again, or name runs"


class PullError(Exception):
    """What could not be fetched, and why."""


def pull(
    url: str,
    session: str,
    to: Path,
    *,
    runs: Sequence[str] = (),
    points: Sequence[str] = (),
    api_key: str | None = None,
    progress: bool | None = None,
) -> Path:
    """Fetch a server's session into a directory of its name below `to`, as sealed Arrow files; whole or not at all.

    `url` is the server's address, with or without `/v1`; `runs` and `points` limit what is fetched. `progress` draws a
    bar, by default on a terminal. Returns the session's directory.

    FileExistsError if it is there already. PullError if the server refuses, cannot be reached, or an answer is cut off,
    or the session changed meanwhile. ValueError if the name, the address or the key can be none.
    """
    folder = to / check_session_id(session)
    if folder.exists():
        raise FileExistsError(f"{folder} is there already: take another directory, or delete it first")
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{url!r} is not a server's address: it must begin with http:// or https://")
    if api_key is not None and not fits_header(api_key):
        raise ValueError("the API key has characters other than printable ASCII")
    to.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=PULLED, dir=to))
    try:
        address = f"{url.rstrip('/').removesuffix('/v1')}/v1/activations/session/{session}/data"
        params = {"run": list(runs), "points": list(points), "format": "arrow"}
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        with held(unfinished), httpx.Client(params=params, headers=headers, timeout=_TIMEOUT) as http:
            quiet = None if progress is None else not progress
            bar = tqdm(unit="iB", unit_scale=True, unit_divisor=1024, desc=session, disable=quiet)
            with bar:
                keep(io.BufferedReader(_Body(http, address, bar), _BUFFER), unfinished, address)
        unfinished.chmod(to.stat().st_mode & 0o777)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


class _Body(io.RawIOBase):
    """A download, fetched page by page, as a file that is read once."""

    def __init__(self, http: httpx.Client, address: str, bar: tqdm[Any]) -> None:
        self._http, self._address, self._bar = http, address, bar
        self._paging, self._held = Paging(), memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._held and not self._paging.is_whole:
            self._held = memoryview(self._page())
            self._bar.total = self._paging.length
            self._bar.update(len(self._held))
        count = min(len(buffer), len(self._held))
        buffer[:count] = self._held[:count]
        self._held = self._held[count:]
        return count

    def _page(self) -> bytes:
        try:
            with self._http.stream("GET", self._address, headers=self._paging.headers) as begun:
                if begun.status_code != 206:
                    begun.read()
                    raise PullError(_CHANGED if begun.status_code == 412 else _reason(begun))
                return self._paging.take(begun.headers, _limited(begun, self._paging.size(begun.headers)))
        except NoPageError as error:
            raise PullError(f"{self._address}: {error}") from error
        except httpx.RemoteProtocolError as error:
            raise PullError(f"the answer was cut off, nothing of it is kept: {error}") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise PullError(f"{self._address}: {str(error) or type(error).__name__}") from error


def _limited(answer: httpx.Response, size: int) -> bytes:
    """An answer's body as it was sent; of one that is longer than it says, not much more."""
    body = bytearray()
    for piece in answer.iter_raw():
        body += piece
        if len(body) > size:
            break
    return bytes(body)


def _reason(answer: httpx.Response) -> str:
    try:
        return f"{answer.status_code}: {answer.json()['error']['message']}"
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError):
        return f"{answer.url} answered {answer.status_code}, and not as a server of activations"


def keep(body: io.BufferedReader[Any] | io.BufferedRandom, folder: Path, source: str) -> None:
    """Write the Arrow streams of a download, each as a file; PullError, which names `source`, if one is damaged."""
    number = 0
    while body.peek(1):
        number += 1
        try:
            _seal(body, folder / f"pulled-{number:06}.arrow")
        except (pa.ArrowException, ValueError, OSError) as error:
            if isinstance(error, OSError) and error.errno:  # the disk's, not Arrow's
                raise
            raise PullError(f"{source} did not send an Arrow stream: {error}") from error


def _seal(body: io.BufferedReader[Any] | io.BufferedRandom, path: Path) -> None:
    """Write one stream as an Arrow file, batch by batch."""
    stream = pa.ipc.open_stream(body)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, stream.schema) as writer:
        for item in stream.iter_batches_with_custom_metadata():
            bad = checksums.damaged(item.batch, checksums.read(item.custom_metadata, stream.schema.names))
            bad += [] if checksums.is_of_run(item.custom_metadata or {}) else ["the description"]
            if bad:
                raise PullError(f"{', '.join(bad)} of a run is not what the server wrote: run `verify` there")
            writer.write_batch(item.batch, custom_metadata=item.custom_metadata)
