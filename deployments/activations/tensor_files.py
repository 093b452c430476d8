"""Tensor files on disk, beside the sessions: `<root>/.tensors/<id>.safetensors`, each as it was sent.

A file's id is made of its bytes, so that the same file sent twice is kept once. What a client calls a file is only ever
looked up among those that are known: no path is made of it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from safetensors import SafetensorError

from deployments.activations.facts import page
from deployments.activations.failures import explain
from deployments.activations.small_files import found, remove, write
from deployments.activations.tensors import TensorType, check, read_types
from deployments.errors import RequestError

FOLDER = ".tensors"  # no session id begins with '.'
MAX_FILES = 1 << 16
_FILE = re.compile(r"(tensor-[0-9a-f]{32})\.safetensors")

logger = logging.getLogger(__name__)


class TensorFile(NamedTuple):
    """One file; `created` is in Unix seconds."""

    tensors: dict[str, TensorType]
    bytes: int
    created: float


class TensorFiles:
    """Every tensor file below one root.

    Reads may come from several threads; `put` and `delete` from one at a time.
    """

    def __init__(self, root: Path) -> None:
        """Read what the files say; links are not followed, other names are passed over.

        Args:
            root: The store's directory, absolute and no link.
        """
        self._root = root
        self._lock = Lock()
        self._files: dict[str, TensorFile] = {}
        for item in found(root, FOLDER):
            self._find(item)

    def _find(self, item: os.DirEntry[str]) -> None:
        if match := _FILE.fullmatch(item.name):
            try:
                stat = item.stat()
                self._files[match[1]] = TensorFile(read_types(item.path), stat.st_size, stat.st_mtime)
            except (OSError, SafetensorError, RequestError):  # one bad file must not keep the others from being served
                logger.exception("tensor file %s cannot be read and is not listed", item.path)

    def list(self, limit: int, after: str | None) -> list[dict[str, Any]]:
        """Up to `limit` files in the order of their ids, beginning behind the id `after`."""
        with self._lock:
            return [_summary(name, self._files[name]) for name in page(self._files, limit, after)]

    def put(self, data: bytes, most: int) -> dict[str, Any]:
        """Keep a file; durable when it returns. One that is there already is left as it is.

        Args:
            data: The file.
            most: The most bytes of all files together.

        Raises:
            RequestError: The file is not one that may be kept, or there is no room for it.
            StoreError: The disk refuses.
        """
        tensors = check(data)
        tensor_id = f"tensor-{hashlib.sha256(data).hexdigest()[:32]}"
        with self._lock:
            known = self._files.get(tensor_id)
            others = [file.bytes for name, file in self._files.items() if name != tensor_id]
        if known and self._path(tensor_id).is_file():
            return _summary(tensor_id, known)
        if sum(others) + len(data) > most or len(others) >= MAX_FILES:
            message = (
                f"{len(others)} tensor files take {sum(others)} bytes, and there is room for {MAX_FILES} of {most} "
                f"bytes together: delete some before you send one of {len(data)} bytes"
            )
            raise RequestError(message, None, "tensor_store_full")
        try:
            file = TensorFile(tensors, len(data), write(self._root, FOLDER, self._path(tensor_id).name, data))
        except OSError as error:
            raise explain(self._root, error) from error
        with self._lock:
            self._files[tensor_id] = file
        return _summary(tensor_id, file)

    def size(self, tensor_id: str) -> int | None:
        """A file's bytes; None if there is none."""
        with self._lock:
            return self._files[tensor_id].bytes if tensor_id in self._files else None

    def read(self, tensor_id: str, first: int = 0, end: int | None = None) -> bytes | None:
        """A file as it was sent, or its bytes from `first` to `end`; None if there is none.

        Raises:
            StoreError: The disk refuses.
        """
        with self._lock:
            if tensor_id not in self._files:
                return None
        try:
            with self._path(tensor_id).open("rb") as file:
                file.seek(first)
                return file.read(-1 if end is None else end - first)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise explain(self._root, error) from error

    def delete(self, tensor_id: str) -> bool:
        """Delete a file: true when it is gone, false if there was none.

        Raises:
            StoreError: The disk refuses.
        """
        with self._lock:
            if tensor_id not in self._files:
                return False
        try:
            remove(self._root, FOLDER, self._path(tensor_id).name)
        except OSError as error:
            raise explain(self._root, error) from error
        with self._lock:
            del self._files[tensor_id]
        return True

    def _path(self, tensor_id: str) -> Path:
        return self._root / FOLDER / f"{tensor_id}.safetensors"


def _summary(tensor_id: str, file: TensorFile) -> dict[str, Any]:
    tensors = {name: {"shape": list(kind.shape), "dtype": kind.dtype} for name, kind in file.tensors.items()}
    return {"id": tensor_id, "bytes": file.bytes, "created": file.created, "tensors": tensors}
