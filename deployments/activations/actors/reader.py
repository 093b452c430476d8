"""The reader of a store as an actor: its own process, so that a bad file cannot crash the process that writes.

For an account, a session that it may not read does not exist. A session may be deleted and its name claimed by another
owner during a query, so its record is compared before and after.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakValueDictionary

import ray

from deployments.accounts import OPERATOR, Account
from deployments.activations.actors.store import find
from deployments.activations.facts import StoreError, explain
from deployments.activations.filters import (
    EVERYTHING,
    IDLE_S,
    Choice,
    DownloadInfo,
    Filter,
    download_changed,
    file_gone,
)
from deployments.activations.state.nodes import described
from deployments.clusters import ON_HEAD, detached
from deployments.errors import RequestError
from deployments.points.token_choices import TokenChoice

if TYPE_CHECKING:  # Serve's controller and the ingress import this module too, and need no Arrow
    from deployments.activations.facts import Entry
    from deployments.activations.state.owners import Record

_T = TypeVar("_T")
MOST_WAITING = 64  # requests for pages that are not answered yet
MOST_OF_ONE = 16  # the same of one owner
_RESTORE_S = 600.0  # that a reader waits for segments that are fetched from the bucket
_MOST_FETCHING = 2  # downloads whose segments are fetched at a time; others of these wait
_START_S = 20.0  # that a reader waits for the store's process, which keeps the catalogue


class ActivationReader:
    """What is answered of stored runs. `wait` returns once the store runs, `restore` fetches files to its disk."""

    def __init__(
        self,
        root: str,
        archive: str | None = None,
        wait: Callable[[], None] | None = None,
        restore: Callable[[Sequence[str]], Awaitable[bool]] | None = None,
    ) -> None:
        from deployments.activations.catalogue.catalogue import SharedCatalogue
        from deployments.activations.export.downloads import Readings
        from deployments.activations.files.places import place_of
        from deployments.activations.nodes.files import NodePlace
        from deployments.activations.state.nodes import Nodes
        from deployments.activations.state.owners import Owners
        from deployments.activations.state.state import Pins

        self._root = Path(root).resolve()
        bucket = place_of(archive) if archive else None
        self._nodes = Nodes(self._root, read_only=True)
        self._on_nodes = NodePlace(root, self._nodes, bucket)
        self._places = [self._on_nodes, *([bucket] if bucket else [])]
        self._catalogue = SharedCatalogue(self._root, wait or partial(_wait, root), archives=bool(archive))
        self._owners, self._pins = Owners(self._root, read_only=True), Pins(self._root, read_only=True)
        self._readings = Readings(self._catalogue, self._places, self._root)
        self._restore, self._fetching = restore or partial(_restore, root), asyncio.Semaphore(_MOST_FETCHING)
        self._locks = WeakValueDictionary[str, asyncio.Lock]()  # of sessions whose segments are fetched
        self._rows_pool = ThreadPoolExecutor(2, thread_name_prefix="stored-rows")  # what they read is in memory at once
        self._data_pool = ThreadPoolExecutor(2, thread_name_prefix="downloads")  # as many pages are in memory at once
        self._waiting = Counter[str | None]()  # requests for pages that are not answered yet, by owner

    async def sessions(
        self, limit: int = 100, after: str | None = None, filter: Filter = EVERYTHING, account: Account = OPERATOR
    ) -> list[dict[str, Any]]:
        """Up to `limit` sessions of the filter, as `Catalogue.sessions`, with `pinned`, `owner` and `shared`."""

        def found() -> list[dict[str, Any]]:
            told = self._catalogue.sessions(limit, after, self._readable(filter, account))
            pinned = self._pins.names()
            return [self._with_owner(one, pinned, account) for one in told if self._may_read(one["id"], account)]

        return await self._found(None, found)

    async def runs(
        self, filter: Filter = EVERYTHING, limit: int = 100, after: str | None = None, account: Account = OPERATOR
    ) -> list[dict[str, Any]]:
        """Up to `limit` runs of the filter, as `Catalogue.runs`; RequestError if there is no run `after`."""

        def found() -> list[dict[str, Any]]:
            runs = self._catalogue.runs(self._readable(filter, account), limit, after)
            if filter.runs and len(runs) < min(limit, len(filter.runs)) and self._on_nodes.flush():
                runs = self._catalogue.runs(self._readable(filter, account), limit, after)
            return described([run for run in runs if self._may_read(run["session_id"], account)], self._nodes)

        return await self._found(None, found)

    async def holding(self, session_id: str, names: Sequence[str]) -> set[str]:
        """Those names of which the session has a run whose id is the name, a `-` and something more."""
        return await self._found(None, lambda: self._catalogue.holding(session_id, names))

    async def session(
        self, session_id: str, limit: int | None = None, after: str | None = None, account: Account = OPERATOR
    ) -> dict[str, Any] | None:
        """One session, `limit` of its runs after the run `after`, and their files; None if there is none."""

        def found() -> dict[str, Any] | None:
            if told := self._catalogue.session(session_id, limit, after):
                told["runs"] = described(told["runs"], self._nodes)
                told["files"] = described(told["files"], self._nodes)
            return told and self._with_owner(told, self._pins.names(), account)

        return await self._found(None, lambda: self._of_session(session_id, account, found))

    async def rows(
        self, run_id: str, points: Sequence[Sequence[str]], tokens: TokenChoice, most: int, account: Account = OPERATOR
    ) -> bytes | None:
        """Rows of a stored run, as `read_rows`; None if there is no such run. RequestError 410 if its file is gone."""
        from deployments.activations.files.places import file_at
        from deployments.activations.reader.stored_rows import read_rows

        def found() -> bytes | None:
            uri, missing = "", None
            while (entry := self._find(run_id)) and entry.uri != uri:
                uri, file = entry.uri, file_at(entry.uri, self._places)
                missing, read = None, partial(read_rows, file, entry, points, tokens, most)
                try:
                    if (rows := self._of_session(entry.facts.session_id, account, read)) is not None:
                        return rows
                except FileNotFoundError:  # it was deleted meanwhile, or went from the disk to the bucket
                    missing = file
            if entry and missing:
                raise file_gone(missing, "from.run_id")
            return None

        return await self._found(self._rows_pool, found)

    async def find_data(
        self, choice: Choice, tag: str | None = None, account: Account = OPERATOR
    ) -> DownloadInfo | None:
        """What a download would be, as `Readings.find`; RequestError also if too many wait for pages."""

        def find(as_is: bool) -> DownloadInfo | None:
            if choice.runs:
                with contextlib.suppress(RequestError):
                    if found := self._readings.find(choice, tag, as_is):
                        return found
                self._on_nodes.flush()  # a node may not have reported a run yet
            return self._readings.find(choice, tag, as_is)

        return await self._paged(choice, account, find)

    async def data_page(self, choice: Choice, tag: str, first: int, end: int, account: Account = OPERATOR) -> bytes:
        """A range of a download, as `Readings.page`; raises as `find_data`, and 412 if it has changed."""
        page = await self._paged(choice, account, lambda as_is: self._readings.page(choice, tag, first, end, as_is))
        if page is None:
            raise download_changed()
        return page

    def _find(self, run_id: str) -> Entry | None:
        """A run, also one that its node has not reported yet."""
        return self._catalogue.find(run_id) or (self._on_nodes.flush() and self._catalogue.find(run_id)) or None

    async def _paged(self, choice: Choice, account: Account, look: Callable[[bool], _T]) -> _T | None:
        """What a look at a session's files gives, once those of the bucket are on the disk, or else as they are."""
        from deployments.activations.export.downloads import ArchivedError

        def found(as_is: bool) -> _T | None:
            return self._of_session(choice.session_id, account, lambda: look(as_is))

        most = MOST_WAITING if account.owner is None else MOST_OF_ONE
        if self._waiting.total() >= MOST_WAITING or self._waiting[account.owner] >= most:
            raise RequestError("too many pages are waited for already; try again", None, "server_busy", 429)
        self._waiting[account.owner] += 1
        try:
            try:
                return await self._found(self._data_pool, partial(found, as_is=False))
            except ArchivedError as archived:  # no thread of the pool waits for the bucket
                await self._explained(self._fetch(choice.session_id, archived.uris))
            return await self._found(self._data_pool, partial(found, as_is=True))
        finally:
            self._waiting[account.owner] -= 1
            self._waiting += Counter()  # without those that wait for none
            asyncio.get_running_loop().call_later(IDLE_S, self._readings.sweep)

    async def _fetch(self, session_id: str, uris: Sequence[str]) -> None:
        """Let segments be fetched from the bucket to the disk if there is room; RequestError if that takes too long."""
        lock = self._locks.setdefault(session_id, asyncio.Lock())
        with _in_time("archived runs are being fetched; try again"):
            async with asyncio.timeout(_RESTORE_S), lock, self._fetching:
                listed = await asyncio.to_thread(self._catalogue.files, session_id)
                if left := [uri for uri in uris if uri in listed]:  # which no other request has fetched
                    await self._restore(left)

    async def _found(self, pool: ThreadPoolExecutor | None, ask: Callable[[], _T]) -> _T:
        return await self._explained(asyncio.get_running_loop().run_in_executor(pool, ask))

    async def _explained(self, asked: Awaitable[_T]) -> _T:
        """What is awaited; errors of files and nodes are raised as answers say them."""
        from deployments.activations.files.places import DamagedError
        from deployments.activations.nodes.files import NodeAwayError

        try:
            return await asked
        except NodeAwayError as error:
            code, status = ("file_gone", 410) if error.lost else ("node_away", 503)
            raise RequestError(str(error), None, code, status) from error
        except OSError as error:
            raise explain(self._root, error) from error
        except DamagedError as error:
            what = "`python -m deployments.activations verify` says what of it can be read"
            raise StoreError(f"a file of stored runs is damaged, {error}: {what}") from error

    def _of_session(self, session_id: str, account: Account, look: Callable[[], _T]) -> _T | None:
        """What a look at a session gives, where the account may read it; else None."""
        record = self._owners.of(session_id)
        if not _may_read(record, account):
            return None
        found = look()
        return found if self._owners.of(session_id) == record else None

    def _may_read(self, session_id: str, account: Account) -> bool:
        return account.is_admin or _may_read(self._owners.of(session_id), account)

    def _readable(self, filter: Filter, account: Account) -> Filter:
        """The same runs, but for those that the account may not read."""
        if account.is_admin:
            return filter
        return filter._replace(among=self._owners.readable(account))

    def _with_owner(self, session: dict[str, Any], pinned: frozenset[str], account: Account) -> dict[str, Any]:
        told = session | {"pinned": session["id"] in pinned}
        if account.owner is None:
            return told
        record = self._owners.of(session["id"])
        return told | {"owner": record and record.owner, "shared": bool(record and record.shared)}


def _may_read(record: Record | None, account: Account) -> bool:
    return account.may_read(record.owner, record.shared) if record else account.may_read(None)


async def _restore(root: str, uris: Sequence[str]) -> bool:
    store = await asyncio.to_thread(find, root)
    return bool(await store.restore.remote(uris))


def _wait(root: str) -> None:
    """Return once the store's process runs."""
    with _in_time("the activation store starts; try again"):
        find(root).code.remote().future().result(timeout=_START_S)


@contextlib.contextmanager
def _in_time(late: str) -> Iterator[None]:
    """While open, errors of calls of the store's process are raised as their causes, or 503 with the message `late`."""
    try:
        yield
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error
    except (ray.exceptions.RayError, TimeoutError) as error:
        raise RequestError(late, None, "unavailable", 503) from error


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
