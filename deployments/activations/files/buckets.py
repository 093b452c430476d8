"""Object storage: a bucket, or a directory of one, and its files."""

from __future__ import annotations

import contextlib
import posixpath
import shutil
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit

import pyarrow as pa
import pyarrow.fs as pafs

from deployments.activations.facts import public_uri
from deployments.options import check_uri

_PIECE = 8 << 20  # bytes that are copied at a time
ATTEMPTS = 5  # of each request to S3, with growing pauses


class Bucket:
    """A directory of a file system, `path` there; `uri` names it without settings and without a slash at its end.

    Files are named by their paths below it. Every method raises OSError where the storage refuses.
    """

    def __init__(self, fs: Any, path: str, uri: str) -> None:
        self.fs, self.path, self.uri = fs, path, uri

    def __repr__(self) -> str:
        return self.uri

    def uri_of(self, name: str) -> str:
        """The URI of a file."""
        return f"{self.uri}/{quote(name)}"

    def list(self, prefix: str = "") -> dict[str, int]:
        """The names of all files below a directory, and their sizes in bytes."""
        selector = pafs.FileSelector(self._at(prefix), allow_not_found=True, recursive=True)
        files = (info for info in self.fs.get_file_info(selector) if info.type == pafs.FileType.File)
        return {posixpath.relpath(info.path, self.path or "/"): int(info.size) for info in files}

    def size(self, name: str) -> int | None:
        """The length of a file in bytes; None if there is none."""
        info = self.fs.get_file_info(self._at(name))
        return int(info.size) if info.type == pafs.FileType.File else None

    def fetch(self, name: str, to: Path) -> None:
        """Copy a file to the disk."""
        with self.fs.open_input_stream(self._at(name)) as data, to.open("wb") as out:
            shutil.copyfileobj(data, out, _PIECE)

    def put(self, name: str, path: Path) -> None:
        """Copy a file from the disk, in place of an older one; it is durable when this returns."""
        if not isinstance(self.fs, pafs.S3FileSystem):  # whose directories are parts of names
            self.fs.create_dir(posixpath.dirname(self._at(name)), recursive=True)
        try:
            with path.open("rb") as data, self.fs.open_output_stream(self._at(name)) as out:
                shutil.copyfileobj(data, out, _PIECE)
        except OSError:
            with contextlib.suppress(OSError):
                self.remove(name)  # which may have a part of it
            raise

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            self.fs.delete_file(self._at(name))

    def _at(self, name: str) -> str:
        return posixpath.join(self.path, name) if name else self.path


def bucket(uri: str) -> Bucket:
    """The directory that a URI names, opened with the settings in its query.

    `s3://bucket/prefix?region=...&endpoint_override=host:port&scheme=http` and other schemes of `pyarrow.fs`; those
    that it lacks are fsspec's. ValueError if no file system has such URIs, its package is not installed, or the URI may
    contain a key.
    """
    url, public = urlsplit(check_uri(uri)), public_uri(uri)
    settings: dict[str, Any] = {
        name: {"true": True, "false": False}.get(value, value) for name, value in parse_qsl(url.query)
    }
    try:
        if url.scheme == "s3":
            path = f"{url.hostname}{unquote(url.path)}"
            retry = pafs.AwsStandardS3RetryStrategy(max_attempts=ATTEMPTS)
            # Writers wait for the network, so that memory stays bounded; a small object is one request.
            settings |= {"background_writes": False, "allow_delayed_open": True, "retry_strategy": retry}
            fs = pafs.S3FileSystem(**settings)
        elif url.scheme in ("file", "gs", "gcs", "abfs", "abfss", "hdfs", "viewfs"):
            fs, path = pafs.FileSystem.from_uri(uri)
        else:
            from fsspec.core import url_to_fs  # type: ignore[import-untyped]

            other, path = url_to_fs(public, **settings)
            fs = pafs.PyFileSystem(pafs.FSSpecHandler(other))
    except (ImportError, pa.ArrowException, TypeError, ValueError) as error:
        advice = "install its package with pip" if isinstance(error, ImportError) else "S3's are s3://bucket/prefix"
        raise ValueError(f"{public} cannot be a store: {error}; {advice}") from None
    return Bucket(fs, path.rstrip("/"), public)
