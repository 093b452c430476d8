"""The reader of a store as an actor: its own process, so that a bad file cannot crash the process that writes."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import ray

from deployments.accounts import OPERATOR, Account
from deployments.activations.facts import StoreError, explain
from deployments.activations.filters import EVERYTHING, MOST_BYTES, FilePart, Filter
from deployments.clusters import ON_HEAD, detached
from deployments.errors import RequestError
from deployments.points.token_choices import TokenChoice

_T = TypeVar("_T")
logger = logging.getLogger(__name__)
_MOST_WAITING = 64  # requests for bytes of files that are not answered yet


class ActivationReader:
    """What is answered of stored runs. For an account, a session that it may not read does not exist."""

    def __init__(self, root: str, archive: str | None = None) -> None:
        from deployments.activations.index.index import SharedIndex

        self._root = Path(root).resolve()
        self._index = SharedIndex(self._root, archive or "")
        self._rows_pool = ThreadPoolExecutor(2, thread_name_prefix="stored-rows")  # what they read is in memory at once
        self._bytes_pool = ThreadPoolExecutor(4, thread_name_prefix="file-bytes")
        self._waiting = 0  # requests for bytes of files

    async def sessions(
        self, limit: int = 100, after: str | None = None, filter: Filter = EVERYTHING, account: Account = OPERATOR
    ) -> list[dict[str, Any]]:
        """Up to `limit` sessions of the filter, as `Index.sessions`; with their owners where accounts have any."""
        listed = await self._ask(None, lambda: self._index.sessions(limit, after, _own(filter, account)))
        return [_shown(session, account) for session in listed]

    async def runs(
        self, filter: Filter = EVERYTHING, limit: int = 100, after: str | None = None, account: Account = OPERATOR
    ) -> list[dict[str, Any]]:
        """Up to `limit` runs of the filter, as `Index.runs`; RequestError if there is no run `after`."""
        listed = await self._ask(None, lambda: self._index.runs(_own(filter, account), limit, after))
        return [_shown(run, account) for run in listed]

    async def holding(self, session_id: str, names: Sequence[str]) -> set[str]:
        """As `Index.holding`."""
        return await self._ask(None, lambda: self._index.holding(session_id, names))

    async def session(
        self,
        session_id: str,
        limit: int | None = None,
        after: str | None = None,
        account: Account = OPERATOR,
        owner: str | None = None,
    ) -> dict[str, Any] | None:
        """One session, `limit` of its runs after the run `after`, and their files; None if there is none."""

        def found() -> dict[str, Any] | None:
            session = self._index.named(session_id, account, owner)
            return session and self._index.session(session, limit, after)

        session = await self._ask(None, found)
        if session:
            session["runs"] = [_shown(run, account) for run in session["runs"]]
        return session and _shown(session, account)

    async def rows(
        self, run_id: str, points: Sequence[Sequence[str]], tokens: TokenChoice, most: int, account: Account = OPERATOR
    ) -> bytes | None:
        """Rows of a stored run, as `read_rows`; None if there is no such run. RequestError 410 if its file is gone."""
        from deployments.activations.reader.stored_rows import read_rows

        def found() -> bytes | None:
            if (entry := self._index.find(run_id, None if account.is_admin else account.owner)) is None:
                return None
            path = self._root / entry.path
            try:
                return read_rows(path, entry, points, tokens, most)
            except FileNotFoundError as error:
                uri = entry.uri if entry.archived else path.name
                raise _gone(uri, entry.archived, "from.run_id") from error

        return await self._ask(self._rows_pool, found)

    async def file(
        self,
        session_id: str,
        name: str,
        first: int = 0,
        end: int | None = None,
        account: Account = OPERATOR,
        owner: str | None = None,
    ) -> FilePart | None:
        """Bytes `first` to `end` of a session's file, at most `MOST_BYTES`; None if there is none.

        Of a file that is being written, only runs that are durable. RequestError 410 if only the bucket has it, 429 if
        too many wait.
        """

        def found() -> FilePart | None:
            session = self._index.named(session_id, account, owner)
            file = self._index.file(session, name) if session else None
            if file is None:
                return None
            uri = self._index.uri_of(file.path, file.local)
            if not file.local:
                raise _gone(uri, True)
            until = min(file.bytes, first + MOST_BYTES, file.bytes if end is None else end)
            try:
                with (self._root / file.path).open("rb") as opened:
                    return FilePart(os.pread(opened.fileno(), max(0, until - first), first), first, file.bytes)
            except FileNotFoundError as error:
                raise _gone(name, False) from error

        if self._waiting >= _MOST_WAITING:
            raise RequestError("too many requests wait for bytes of files; try again", None, "server_busy", 429)
        self._waiting += 1
        try:
            return await self._ask(self._bytes_pool, found)
        finally:
            self._waiting -= 1

    async def _ask(self, pool: ThreadPoolExecutor | None, ask: Callable[[], _T]) -> _T:
        """Call a function on a thread of a pool; StoreError says what to do about an error of files."""
        from deployments.activations.segments.segments import DamagedError

        try:
            return await asyncio.get_running_loop().run_in_executor(pool, ask)
        except OSError as error:
            raise explain(self._root, error) from error
        except DamagedError as error:
            logger.error("a file of stored runs is damaged: %s", error)
            what = "`python -m deployments.activations verify` says what of it can be read"
            raise StoreError(f"a file of stored runs is damaged: {what}") from error


def _own(filter: Filter, account: Account) -> Filter:
    """A filter, limited to the runs that the account may read."""
    return filter if account.is_admin else filter._replace(owner=account.owner)


def _shown(item: dict[str, Any], account: Account) -> dict[str, Any]:
    if account.owner is None:
        del item["owner"]
    return item


def _gone(uri: str, archived: bool, field: str | None = None) -> RequestError:
    if archived:
        return RequestError(f"only the archive has this file: read {uri}", field, "archived", 410)
    return RequestError(f"the file {uri} was removed, and its runs with it", field, "file_gone", 410)


def connect_reader(root: str, archive: str | None = None) -> Any:
    """A handle to the reader of the store of `root`, a named actor like the store; the first call starts it."""
    name = f"activation reader of {root}"
    reader = detached(ActivationReader, name, max_task_retries=1, max_concurrency=10_000, resources=ON_HEAD)
    return reader.remote(root, archive)


async def survived(asked: Awaitable[Any], what: str) -> Any:
    """What a reader answers; StoreError, which names `what` it read, if the file ended its process."""
    try:
        return await asked
    except ray.exceptions.RayActorError as error:
        raise StoreError(
            f"the reader of stored runs ended twice while it read {what}: send the request again, and where it ends "
            "again, look for a damaged file by `python -m deployments.activations verify`"
        ) from error
