"""Readouts on disk, beside the sessions: `<root>/.readouts/<name>.safetensors`, its spec in the file's metadata.

One with an owner is `<name>@<owner>.safetensors`: each owner has names of their own.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from safetensors.torch import save

from deployments.activations.accounts import OPERATOR, Account
from deployments.activations.facts import page
from deployments.activations.failures import explained
from deployments.activations.files.atomic import found, remove, write
from deployments.activations.files.bounds import check_room
from deployments.errors import RequestError
from deployments.points.readouts import ReadoutSpec
from deployments.readouts.checks import Definition, define

FOLDER = ".readouts"  # no session id begins with '.'
MAX_READOUTS = 1 << 10
_FILE = re.compile(r"([A-Za-z0-9_-][A-Za-z0-9._-]{0,63})(?:@([A-Za-z0-9_.-]+))?\.safetensors")

logger = logging.getLogger(__name__)


class ReadoutFile(NamedTuple):
    """One readout.

    Attributes:
        spec: What it is.
        id: Another one for other tensors or another spec.
        hidden: Entries of a row that it reads.
        size: How many values it gives.
        bytes: The file's.
        created: In Unix seconds.
        owner: Whose it is.
    """

    spec: ReadoutSpec
    id: str
    hidden: int
    size: int
    bytes: int
    created: float
    owner: str | None

    def told(self, account: Account) -> dict[str, Any]:
        """The same for an answer."""
        said = self.spec.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
        told = {"object": "readout", **said, "activation": self.spec.activation, "id": self.id}
        told |= {"hidden": self.hidden, "values": self.size, "bytes": self.bytes, "created": self.created}
        return told if account.owner is None else told | {"owner": self.owner}


_Key = tuple[str, str | None]  # name and owner


class ReadoutFiles:
    """Every readout below one root. Reads may come from several threads; `put` and `delete` from one at a time."""

    def __init__(self, root: Path) -> None:
        """Read what there is; links are not followed, other names are passed over.

        Args:
            root: The store's directory, absolute and no link.
        """
        self._root = root
        self._lock = Lock()
        self._files: dict[_Key, ReadoutFile] = {}
        for item in found(root, FOLDER):
            self._find(item)

    def _find(self, item: os.DirEntry[str]) -> None:
        if match := _FILE.fullmatch(item.name):
            try:
                data = Path(item.path).read_bytes()
                self._files[match[1], match[2]] = _described(define(data), data, item.stat().st_mtime, match[2])
            except (OSError, RequestError):  # one bad file must not keep the others from being served
                logger.exception("readout %s cannot be read and is not listed", item.path)

    def list(self, limit: int, after: str | None, account: Account = OPERATOR) -> list[dict[str, Any]]:
        """Up to `limit` readouts that the account may read in the order of their names, behind the name `after`."""
        with self._lock:
            seen = {name: self._seen(name, account) for name, _ in self._files}
        return [one.told(account) for name in page(list(seen), limit, after) if (one := seen[name]) is not None]

    def put(
        self,
        data: bytes,
        spec: Mapping[str, Any] | None,
        most: int,
        account: Account = OPERATOR,
        most_of_one: int | None = None,
    ) -> dict[str, Any]:
        """Keep a readout; durable when it returns. The same one again is left as it is.

        Args:
            data: The file.
            spec: What is said beside it.
            most: The most bytes of all readouts together.
            account: Who sends it.
            most_of_one: The most bytes of all their readouts together, unless they are an admin.

        Raises:
            RequestError: It is none, the name is taken, or there is no room.
            StoreError: The disk refuses.
        """
        defined = define(data, spec)
        kept = save(defined.tensors, {"spec": defined.spec.model_dump_json(exclude_none=True, exclude_defaults=True)})
        new = _described(defined, kept, 0.0, account.owner)
        key = defined.spec.name, account.owner
        with self._lock:
            known, files = self._files.get(key), dict(self._files)
        if known is not None:
            if known.id == new.id:
                return known.told(account)
            message = f"there is a readout {key[0]!r} already: delete it first, or choose another name"
            raise RequestError(message, "spec.name", "readout_exists")
        _check_room(list(files.values()), len(kept), most)
        if not account.is_admin and most_of_one is not None:
            _check_room([one for one in files.values() if one.owner == account.owner], len(kept), most_of_one)
        with explained(self._root):
            new = new._replace(created=write(self._root, FOLDER, _name(key), kept))
        with self._lock:
            self._files[key] = new
        return new.told(account)

    def get(self, name: str, account: Account = OPERATOR) -> dict[str, Any] | None:
        """What a readout is; None if there is none that the account may read."""
        with self._lock:
            seen = self._seen(name, account)
        return seen.told(account) if seen else None

    def read(self, name: str, account: Account = OPERATOR, first: int = 0, end: int | None = None) -> bytes | None:
        """A readout's file, likewise: its bytes from `first` to `end`.

        Raises:
            StoreError: The disk refuses.
        """
        with self._lock:
            seen = self._seen(name, account)
        if seen is None:
            return None
        path = self._root / FOLDER / _name((name, seen.owner))
        with explained(self._root), contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            file.seek(first)
            return file.read(-1 if end is None else end - first)
        return None

    def delete(self, name: str, account: Account = OPERATOR) -> bool:
        """Delete a readout: true when it is gone, false if there was none that the account may change.

        Raises:
            StoreError: The disk refuses.
        """
        with self._lock:
            seen = self._seen(name, account)
        if seen is None or not account.may_change(seen.owner):
            return False
        with explained(self._root):
            remove(self._root, FOLDER, _name((name, seen.owner)))
        with self._lock:
            del self._files[name, seen.owner]
        return True

    def _seen(self, name: str, account: Account) -> ReadoutFile | None:
        """Their own of a name, else the one without an owner; to an admin, else anybody's."""
        own = [one for owner in (account.owner, None) if (one := self._files.get((name, owner)))]
        if account.is_admin:
            own += [one for (called, _), one in self._files.items() if called == name]
        return next((one for one in own if account.may_read(one.owner)), None)


def _described(defined: Definition, data: bytes, created: float, owner: str | None) -> ReadoutFile:
    digest = hashlib.sha256(data).hexdigest()[:32]
    return ReadoutFile(defined.spec, f"readout-{digest}", defined.hidden, defined.size, len(data), created, owner)


def _name(key: _Key) -> str:
    name, owner = key
    return f"{name}@{owner}.safetensors" if owner else f"{name}.safetensors"


def _check_room(others: list[ReadoutFile], size: int, most: int) -> None:
    check_room("readouts", [one.bytes for one in others], size, MAX_READOUTS, most, "install", "readout_store_full")
