"""The files and directories that URIs and paths name."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import pyarrow as pa
import pyarrow.fs as pafs

from deployments.activations.facts import public_uri, store_id
from deployments.activations.files.places import Directory, DiskFile, File, Place, Source
from deployments.options import check_uri

ATTEMPTS = 5  # of each request to S3, with growing pauses


def place_of(uri: str) -> Place:
    """The directory that a URI names, opened with the settings in its query.

    `s3://bucket/prefix?region=...&endpoint_override=host:port&scheme=http`; all other schemes are those of
    `pyarrow.fs`. ValueError if no file system has such URIs, or it may contain a key.
    """
    public = public_uri(check_uri(uri))
    if urlsplit(uri).scheme == "s3":
        try:
            fs, path = _s3(uri)
        except (pa.ArrowException, TypeError) as error:
            raise ValueError(f"{public} is no place for a store: {error}") from None
    else:
        try:
            fs, path = pafs.FileSystem.from_uri(uri)
        except pa.ArrowException as error:
            raise ValueError(f"{public} is no place for a store: {error}; S3's are s3://bucket/prefix") from None
    return Place(fs, path.rstrip("/"), public, store_id(uri))


def _s3(uri: str) -> tuple[Any, str]:
    url = urlsplit(uri)
    settings = {name: {"true": True, "false": False}.get(value, value) for name, value in parse_qsl(url.query)}
    fs = pafs.S3FileSystem(
        **settings,
        background_writes=False,  # memory stays bounded: a writer waits for the network
        allow_delayed_open=True,  # a small object is one request
        retry_strategy=pafs.AwsStandardS3RetryStrategy(max_attempts=ATTEMPTS),
    )
    return fs, f"{url.hostname}{unquote(url.path)}"


def path_of(uri: str) -> Path:
    """The path of a `file:` URI of this machine."""
    return Path(unquote(urlsplit(uri).path))


def file_at(uri: str, places: Sequence[Place] = ()) -> File:
    """A store's file by its URI in a catalogue: below one of `places`, else on a local disk."""
    for place in places:
        if uri.startswith(f"{place.uri}/"):
            return place.file(unquote(uri.removeprefix(f"{place.uri}/")))
    return DiskFile(path_of(uri))


def source_of(source: str | os.PathLike[str] | Source) -> Source:
    """The file or directory that a path or URI names; ValueError if it is on another machine or of no file system."""
    if isinstance(source, (File, Place)):
        return source
    text = os.fspath(source)
    if "://" not in text:
        path = Path(text).expanduser()
    elif (url := urlsplit(text)).scheme != "file":
        place = place_of(text)
        is_file = place.path.endswith(".arrow")
        return File(place.fs, place.path, place.uri, place.above) if is_file else place
    elif url.netloc not in ("", "localhost"):
        raise ValueError(f"{text!r} is not a file:// URI of this machine")
    else:
        path = path_of(text)
    return DiskFile(path) if path.is_file() else Directory(path)
