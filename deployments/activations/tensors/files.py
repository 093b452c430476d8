"""Tensor files on disk, beside the sessions: `<root>/.tensors/<id>.safetensors`, each as it was sent.

A file with an owner is `<id>@<owner>.safetensors`. Its id is made of its bytes and its owner, so that the same file
sent twice is kept once, and each file has one owner. What a client calls a file is only ever looked up among those that
are known: no path is made of it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from safetensors import SafetensorError

from deployments.activations.accounts import OPERATOR, Account
from deployments.activations.facts import page
from deployments.activations.failures import explain
from deployments.activations.files.atomic import found, remove, write
from deployments.activations.tensors.tensors import TensorType, check, read_types
from deployments.errors import RequestError

FOLDER = ".tensors"  # no session id begins with '.'
MAX_FILES = 1 << 16
MAX_OF_ONE = 1 << 12  # files of an owner who has a quota
_FILE = re.compile(r"(tensor-[0-9a-f]{32})(?:@([A-Za-z0-9_.-]+))?\.safetensors")

logger = logging.getLogger(__name__)


class TensorFile(NamedTuple):
    """One file; `created` is in Unix seconds."""

    tensors: dict[str, TensorType]
    bytes: int
    created: float
    owner: str | None = None


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
                self._files[match[1]] = TensorFile(read_types(item.path), stat.st_size, stat.st_mtime, match[2])
            except (OSError, SafetensorError, RequestError):  # one bad file must not keep the others from being served
                logger.exception("tensor file %s cannot be read and is not listed", item.path)

    def list(self, limit: int, after: str | None, account: Account = OPERATOR) -> list[dict[str, Any]]:
        """Up to `limit` files that the account may read in the order of their ids, beginning behind the id `after`."""
        with self._lock:
            names = [name for name, file in self._files.items() if account.may_read(file.owner)]
            return [_summary(name, self._files[name], account) for name in page(names, limit, after)]

    def put(
        self, data: bytes, most: int, account: Account = OPERATOR, most_of_one: int | None = None
    ) -> dict[str, Any]:
        """Keep a file; durable when it returns. One that is there already is left as it is.

        Args:
            data: The file.
            most: The most bytes of all files together.
            account: Who sends it.
            most_of_one: The most bytes of all their files together, unless they are an admin.

        Raises:
            RequestError: The file is not one that may be kept, or there is no room for it.
            StoreError: The disk refuses.
        """
        tensors = check(data)
        tensor_id = _id(data, account.owner)
        file = TensorFile(tensors, len(data), 0.0, account.owner)
        with self._lock:
            known = self._files.get(tensor_id)
            others = [other for name, other in self._files.items() if name != tensor_id]
        if known and self._path(tensor_id, known).is_file():
            return _summary(tensor_id, known, account)
        _check_room(others, len(data), MAX_FILES, most)
        if not account.is_admin and most_of_one is not None:
            own = [other for other in others if other.owner == account.owner]
            _check_room(own, len(data), MAX_OF_ONE, most_of_one, " of yours")
        try:
            file = file._replace(created=write(self._root, FOLDER, self._path(tensor_id, file).name, data))
        except OSError as error:
            raise explain(self._root, error) from error
        with self._lock:
            self._files[tensor_id] = file
        return _summary(tensor_id, file, account)

    def size(self, tensor_id: str, account: Account = OPERATOR) -> int | None:
        """A file's bytes; None if there is none that the account may read."""
        with self._lock:
            file = self._files.get(tensor_id)
        return file.bytes if file is not None and account.may_read(file.owner) else None

    def read(self, tensor_id: str, account: Account = OPERATOR, first: int = 0, end: int | None = None) -> bytes | None:
        """A file as it was sent, or its bytes from `first` to `end`; None if there is none that the account may read.

        Raises:
            StoreError: The disk refuses.
        """
        with self._lock:
            file = self._files.get(tensor_id)
        if file is None or not account.may_read(file.owner):
            return None
        try:
            with self._path(tensor_id, file).open("rb") as opened:
                opened.seek(first)
                return opened.read(-1 if end is None else end - first)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise explain(self._root, error) from error

    def delete(self, tensor_id: str, account: Account = OPERATOR) -> bool:
        """Delete a file: true when it is gone, false if there was none that the account may change.

        Raises:
            StoreError: The disk refuses.
        """
        with self._lock:
            file = self._files.get(tensor_id)
        if file is None or not account.may_change(file.owner):
            return False
        try:
            remove(self._root, FOLDER, self._path(tensor_id, file).name)
        except OSError as error:
            raise explain(self._root, error) from error
        with self._lock:
            del self._files[tensor_id]
        return True

    def _path(self, tensor_id: str, file: TensorFile) -> Path:
        of = f"@{file.owner}" if file.owner else ""
        return self._root / FOLDER / f"{tensor_id}{of}.safetensors"


def _id(data: bytes, owner: str | None) -> str:
    digest = hashlib.sha256(data)
    if owner is not None:
        digest.update(f"@{owner}".encode())
    return f"tensor-{digest.hexdigest()[:32]}"


def _check_room(others: Sequence[TensorFile], size: int, count: int, most: int, whose: str = "") -> None:
    used = sum(file.bytes for file in others)
    if used + size > most or len(others) >= count:
        message = (
            f"{len(others)} tensor files{whose} take {used} bytes, and there is room for {count} of {most} bytes "
            f"together: delete some before you send one of {size} bytes"
        )
        raise RequestError(message, None, "tensor_store_full")


def _summary(tensor_id: str, file: TensorFile, account: Account) -> dict[str, Any]:
    tensors = {name: {"shape": list(kind.shape), "dtype": kind.dtype} for name, kind in file.tensors.items()}
    summary = {"id": tensor_id, "bytes": file.bytes, "created": file.created, "tensors": tensors}
    return summary if account.owner is None else summary | {"owner": file.owner}
