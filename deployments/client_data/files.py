"""Files that clients upload, below the store's root: `<folder>/<name>.safetensors`, with an owner `<name>@<owner>`.

A name that a client sends is looked up among the names of known files. It never becomes part of a path.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from safetensors import SafetensorError

from deployments.accounts import OPERATOR, Account
from deployments.activations.facts import explained
from deployments.activations.files.disk import NEW, directory, remove_unfinished, write
from deployments.errors import RequestError

_FILE = re.compile(r"([A-Za-z0-9_-][A-Za-z0-9._-]{0,63})(?:@([A-Za-z0-9_.-]+))?\.safetensors")

logger = logging.getLogger(__name__)


class ClientFile(NamedTuple):
    """One file; `about` has further fields for answers, `created` is in Unix seconds."""

    name: str
    owner: str | None
    id: str
    bytes: int
    created: float
    about: dict[str, Any]

    def as_json(self, account: Account) -> dict[str, Any]:
        """The file as answers describe it; `owner` is there for accounts that have keys."""
        answer = {**self.about, "id": self.id, "bytes": self.bytes, "created": self.created}
        return answer if account.owner is None else answer | {"owner": self.owner}

    @property
    def file_name(self) -> str:
        """Its name on the disk."""
        return f"{self.name}@{self.owner}.safetensors" if self.owner else f"{self.name}.safetensors"


class ClientFiles(ABC):
    """All files of one kind. Reads may come from several threads, changes from one at a time.

    All methods raise StoreError on a disk error. A file that an account may not read or change does not exist for it.
    """

    folder: str  # no session id begins with '.'
    kind: str  # in the plural, for messages
    noun: str  # of one with a name, for messages and codes
    verb: str  # for sending one
    full: str  # the code of a refusal for want of room
    most_files: int

    def __init__(self, root: Path) -> None:
        """Read what there is in the store's directory; links are not followed, other names are passed over."""
        self._root = root
        self._lock = Lock()
        self._files: dict[tuple[str, str | None], ClientFile] = {}
        for item in files_in(root / self.folder):
            if match := _FILE.fullmatch(item.name):
                try:
                    id, about = self.described(Path(item.path))
                    stat = item.stat()
                except (OSError, ValueError, KeyError, SafetensorError):  # others are served all the same
                    logger.exception("%s cannot be read and is not listed", item.path)
                    continue
                file = ClientFile(match[1], match[2], id, stat.st_size, stat.st_mtime, about)
                self._files[file.name, file.owner] = file

    @abstractmethod
    def described(self, path: Path) -> tuple[str, dict[str, Any]]:
        """A file's id, and the fields that answers have of it."""

    def list(self, limit: int, after: str | None, account: Account = OPERATOR) -> list[dict[str, Any]]:
        """Up to `limit` files, one for each name that `_find` finds, in the order of their names after `after`."""
        with self._lock:
            names = sorted({name for name, _ in self._files if after is None or name > after})
        found = (file for name in names if (file := self._find(name, account)))
        return [file.as_json(account) for file in itertools.islice(found, limit)]

    def get(self, name: str, account: Account = OPERATOR) -> dict[str, Any] | None:
        """What a file is; None if there is none."""
        file = self._find(name, account)
        return file.as_json(account) if file else None

    def read(self, name: str, account: Account = OPERATOR, first: int = 0, end: int | None = None) -> bytes | None:
        """A file, or its bytes from `first` to `end`; None if there is none."""
        if (file := self._find(name, account)) is None:
            return None
        if first >= file.bytes:  # a disk refuses to seek far after the end
            return b""
        with explained(self._root), contextlib.suppress(FileNotFoundError), self._path(file).open("rb") as opened:
            opened.seek(first)
            return opened.read(-1 if end is None else end - first)
        return None

    def delete(self, name: str, account: Account = OPERATOR) -> bool:
        """Delete a file: true when it is gone, false if there was none that the account may change."""
        if (file := self._find(name, account)) is None:
            return False
        remove(self._root, self.folder, file.file_name)
        with self._lock:
            del self._files[file.name, file.owner]
        return True

    def keep(self, new: ClientFile, pieces: Iterable[bytes], most: int, account: Account) -> dict[str, Any]:
        """Write a file of about `new.bytes`, durable when it returns; the same one again is left as it is.

        RequestError if its name is taken, or files would take more than `most` bytes.
        """
        key = new.name, new.owner
        known = self._files.get(key)
        if known and self._path(known).is_file():
            if known.id == new.id:
                return known.as_json(account)
            # A tensor file's name is its id.
            message = f"there is a {self.noun} {new.name!r} already: delete it first, or choose another name"
            raise RequestError(message, "spec.name", f"{self.noun}_exists")
        others = [file for place, file in self._files.items() if place != key]
        own = [file for file in others if file.owner == new.owner is not None]  # leaves other owners as much as it has
        used, most_files = sum(file.bytes for file in others), self.most_files - len(own)
        if used + new.bytes > most - sum(file.bytes for file in own) or len(others) >= most_files:
            room = f"there is room for {self.most_files} of {most} bytes together"
            room += ", of which each owner leaves as much as it takes"
            message = f"{len(others)} {self.kind} take {used} bytes, and {room}: delete some before you {self.verb} one"
            raise RequestError(f"{message} of {new.bytes} bytes", None, self.full)
        with explained(self._root):
            state = write(self._root, self.folder, new.file_name, pieces)
        new = new._replace(bytes=state.st_size, created=state.st_mtime)
        with self._lock:
            self._files[key] = new
        return new.as_json(account)

    def _path(self, file: ClientFile) -> Path:
        return self._root / self.folder / file.file_name

    def _find(self, name: str, account: Account) -> ClientFile | None:
        """Their own of a name, else the one without an owner, also for an admin: a name means nobody else's file."""
        with self._lock:
            found = [file for owner in (account.owner, None) if (file := self._files.get((name, owner)))]
        return next((file for file in found if account.may_change(file.owner)), None)


def pieces_of(path: Path, first: int = 0) -> Iterator[bytes]:
    """A file's bytes from `first` on, a MiB at a time."""
    with path.open("rb") as file:
        file.seek(first)
        while piece := file.read(1 << 20):
            yield piece


def remove(root: Path, folder: str, name: str) -> None:
    """Remove a file in a folder of `root`, if it is there; durable when this returns. StoreError on a disk error."""
    with explained(root), directory(root) as top, directory(folder, top) as place:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=place)
        os.fsync(place)


def files_in(folder: Path) -> Iterator[os.DirEntry[str]]:
    """The files of a folder, if it is there; links are not followed, and what a crash cut short is removed."""
    if not folder.is_dir() or folder.is_symlink():
        return
    for item in list(os.scandir(folder)):
        if item.name.startswith(NEW):
            remove_unfinished(item)
        elif item.is_file(follow_symlinks=False):
            yield item
