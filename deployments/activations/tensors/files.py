"""Tensor files on disk, beside the sessions: `<root>/.tensors/<id>.safetensors`, each as it was sent.

A file with an owner is `<id>@<owner>.safetensors`. Its id is made of its bytes and its owner, so that the same file
sent twice is kept once, and each file has one owner. What a client calls a file is only ever looked up among those that
are known: no path is made of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError

from deployments.activations.accounts import OPERATOR, Account
from deployments.activations.facts import page
from deployments.activations.failures import explained
from deployments.activations.files.atomic import found, remove, write
from deployments.activations.files.bounds import check_room
from deployments.activations.tensors.tensors import TensorType, check, read_types
from deployments.errors import RequestError

FOLDER = ".tensors"  # no session id begins with '.'
MAX_FILES = 1 << 16
MAX_OF_ONE = 1 << 12  # files of an owner who has a quota
_FILE = re.compile(r"(tensor-[0-9a-f]{32})(?:@([A-Za-z0-9_.-]+))?\.safetensors")

logger = logging.getLogger(__name__)


class TensorFile(NamedTuple):
    """One file; `created` is in Unix seconds."""

    id: str
    path: Path
    tensors: dict[str, TensorType]
    bytes: int
    created: float
    owner: str | None = None

    def summary(self, account: Account) -> dict[str, Any]:
        """What the account is told of it."""
        tensors = {name: {"shape": list(kind.shape), "dtype": kind.dtype} for name, kind in self.tensors.items()}
        said = {"id": self.id, "bytes": self.bytes, "created": self.created, "tensors": tensors}
        return said if account.owner is None else said | {"owner": self.owner}


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
        self._files: dict[str, TensorFile] = {}  # each change is one step, so readers need no lock
        for item in found(root, FOLDER):
            if match := _FILE.fullmatch(item.name):
                path = Path(item.path)
                try:
                    stat, types = item.stat(), read_types(item.path)
                except (OSError, SafetensorError, RequestError):  # one bad file must not keep others from being served
                    logger.exception("tensor file %s cannot be read and is not listed", path)
                    continue
                self._files[match[1]] = TensorFile(match[1], path, types, stat.st_size, stat.st_mtime, match[2])

    def list(self, limit: int, after: str | None, account: Account = OPERATOR) -> list[dict[str, Any]]:
        """Up to `limit` files that the account may read in the order of their ids, beginning behind the id `after`."""
        files = dict(self._files)
        names = page((name for name, file in files.items() if account.may_read(file.owner)), limit, after)
        return [files[name].summary(account) for name in names]

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
        tensors, owner = check(data), account.owner
        digest = hashlib.sha256(data)
        if owner is not None:
            digest.update(f"@{owner}".encode())
        id = f"tensor-{digest.hexdigest()[:32]}"
        known = self._files.get(id)
        if known and known.path.is_file():
            return known.summary(account)
        others = [file for file in self._files.values() if file.id != id]
        _check_room(others, len(data), MAX_FILES, most)
        if not account.is_admin and most_of_one is not None:
            own = [file for file in others if file.owner == owner]
            _check_room(own, len(data), MAX_OF_ONE, most_of_one, " of yours")
        name = f"{id}@{owner}.safetensors" if owner else f"{id}.safetensors"
        with explained(self._root):
            created = write(self._root, FOLDER, name, data)
        self._files[id] = TensorFile(id, self._root / FOLDER / name, tensors, len(data), created, owner)
        return self._files[id].summary(account)

    def size(self, tensor_id: str, account: Account = OPERATOR) -> int | None:
        """A file's bytes; None if there is none that the account may read."""
        file = self._files.get(tensor_id)
        return file.bytes if file is not None and account.may_read(file.owner) else None

    def read(self, tensor_id: str, account: Account = OPERATOR, first: int = 0, end: int | None = None) -> bytes | None:
        """A file as it was sent, or its bytes from `first` to `end`; None if there is none that the account may read.

        Raises:
            StoreError: The disk refuses.
        """
        file = self._files.get(tensor_id)
        if file is None or not account.may_read(file.owner):
            return None
        with explained(self._root), contextlib.suppress(FileNotFoundError), file.path.open("rb") as opened:
            opened.seek(first)
            return opened.read(-1 if end is None else end - first)
        return None

    def delete(self, tensor_id: str, account: Account = OPERATOR) -> bool:
        """Delete a file: true when it is gone, false if there was none that the account may change.

        Raises:
            StoreError: The disk refuses.
        """
        file = self._files.get(tensor_id)
        if file is None or not account.may_change(file.owner):
            return False
        with explained(self._root):
            remove(self._root, FOLDER, file.path.name)
        del self._files[tensor_id]
        return True


def _check_room(others: Sequence[TensorFile], size: int, count: int, most: int, whose: str = "") -> None:
    sizes = [file.bytes for file in others]
    check_room(f"tensor files{whose}", sizes, size, count, most, "send", "tensor_store_full")
