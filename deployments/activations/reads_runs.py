"""What the store tells of runs, and hands over of them: to each account what it may read.

What an account may not read is not there for it. A session may be deleted, and its name claimed by somebody else, while
it is looked at: so its record is compared before and behind.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from deployments.activations.accounts import OPERATOR, Account
from deployments.activations.downloads import IDLE_S, Choice, Found, changed
from deployments.activations.failures import explain
from deployments.activations.filters import EVERYTHING, Filter
from deployments.activations.interventions import TokenChoice
from deployments.errors import RequestError

if TYPE_CHECKING:  # Serve's controller and the ingress import this module too, and need no Arrow
    from deployments.activations.catalogue import Catalogue
    from deployments.activations.objects import AnyRoot
    from deployments.activations.owners import Owners, Record
    from deployments.activations.pins import Pins
    from deployments.activations.readings import Readings


MOST_WAITING = 64  # requests for pages that are not answered yet
MOST_OF_ONE = 16  # the same of one owner


class ReadsRuns:
    """What the store answers of stored runs."""

    _catalogue: Catalogue
    _owners: Owners
    _pins: Pins
    _readings: Readings
    _root: AnyRoot
    _rows_pool: ThreadPoolExecutor
    _data_pool: ThreadPoolExecutor
    _waiting: Counter[str | None]  # requests for pages that are not answered yet, by owner

    async def sessions(
        self,
        limit: int = 100,
        after: str | None = None,
        filter: Filter = EVERYTHING,
        account: Account = OPERATOR,
    ) -> list[dict[str, Any]]:
        """Up to `limit` sessions that hold a run of the filter, as `Catalogue.sessions`, with `pinned`.

        With keys there are `owner` and `shared`, too.

        Raises:
            StoreError: The disk refuses.
        """

        def found() -> list[dict[str, Any]]:
            told = self._catalogue.sessions(limit, after, self._readable(filter, account))
            pinned = self._pins.names()
            return [self._told(one, pinned, account) for one in told if self._may_read(one["id"], account)]

        return await self._found(None, found)  # type: ignore[no-any-return]

    async def runs(
        self,
        filter: Filter = EVERYTHING,
        limit: int = 100,
        after: str | None = None,
        account: Account = OPERATOR,
    ) -> list[dict[str, Any]]:
        """Up to `limit` runs of the filter, as `Catalogue.runs`.

        Raises:
            RequestError: There is no run `after`; names `after`.
            StoreError: The disk refuses.
        """

        def found() -> list[dict[str, Any]]:
            runs = self._catalogue.runs(self._readable(filter, account), limit, after)
            return [run for run in runs if self._may_read(run["session_id"], account)]

        return await self._found(None, found)  # type: ignore[no-any-return]

    async def holding(self, session_id: str, run_ids: Sequence[str]) -> set[str]:
        """Which of these runs the session has.

        Raises:
            StoreError: The disk refuses.
        """
        return await self._found(None, self._catalogue.holding, session_id, run_ids)  # type: ignore[no-any-return]

    async def session(
        self, session_id: str, limit: int | None = None, after: str | None = None, account: Account = OPERATOR
    ) -> dict[str, Any] | None:
        """One session with its runs, all or `limit` of them behind the run `after`, and files; None if there is none.

        With keys there are `owner` and `shared`, too.

        Raises:
            RequestError: The session has no run `after`; names `after`.
            StoreError: The disk refuses.
        """

        def found() -> dict[str, Any] | None:
            told = self._catalogue.session(session_id, limit, after)
            return told and self._told(told, self._pins.names(), account)

        return await self._found(None, self._of_session, session_id, account, found)  # type: ignore[no-any-return]

    async def rows(
        self,
        run_id: str,
        points: Sequence[Sequence[str]],
        tokens: TokenChoice,
        most: int,
        account: Account = OPERATOR,
    ) -> bytes | None:
        """Some rows of a stored run, as `stored_rows.read_rows` gives them; None if there is no such run.

        Args:
            run_id: The run.
            points: Each by the names that it may have been recorded by.
            tokens: Which of the run's tokens.
            most: The most bytes.
            account: Who asks.

        Raises:
            RequestError: The run has no such point or token, or there are more bytes; names the field of `from`.
            StoreError: The disk refuses.
        """
        from deployments.activations.reader import within
        from deployments.activations.stored_rows import read_rows

        def found() -> bytes | None:
            entry = self._catalogue.find(run_id)
            if entry is None:
                return None
            file = within(self._root, entry.uri)
            read = partial(read_rows, file, entry, points, tokens, most)
            return self._of_session(entry.facts.session_id, account, read)  # type: ignore[no-any-return]

        return await self._found(self._rows_pool, found)  # type: ignore[no-any-return]

    async def find_data(self, choice: Choice, tag: str | None = None, account: Account = OPERATOR) -> Found | None:
        """What a download would be, as `Readings.find`; None if there is no such session.

        Raises:
            RequestError: There is no such run or point, too much for one file, or too many wait for pages.
            StoreError: The disk refuses.
        """
        find = partial(self._readings.find, choice, tag)
        return await self._paged(account, self._of_session, choice.session_id, account, find)  # type: ignore[no-any-return]

    async def data_page(self, choice: Choice, tag: str, first: int, end: int, account: Account = OPERATOR) -> bytes:
        """A range of a download, as `Readings.page`.

        Raises:
            RequestError: 412, the session holds something else by now; or too many wait for pages.
            StoreError: The disk refuses, or a file is not what it was.
        """
        read = partial(self._readings.page, choice, tag, first, end)
        page: bytes | None = await self._paged(account, self._of_session, choice.session_id, account, read)
        if page is None:
            raise changed()
        return page

    async def _paged(self, account: Account, ask: Callable[..., Any], *args: Any) -> Any:
        most = MOST_WAITING if account.owner is None else MOST_OF_ONE
        if self._waiting[account.owner] >= most or self._waiting.total() >= MOST_WAITING:
            raise RequestError("too many pages are waited for already; try again", None, "server_busy", 429)
        self._waiting[account.owner] += 1
        try:
            return await self._found(self._data_pool, ask, *args)
        finally:
            self._waiting[account.owner] -= 1
            self._waiting += Counter()  # without those that wait for none
            asyncio.get_running_loop().call_later(IDLE_S, self._readings.sweep)

    async def _found(self, pool: ThreadPoolExecutor | None, ask: Callable[..., Any], *args: Any) -> Any:
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, ask, *args)
        except OSError as error:
            raise explain(self._root, error) from error

    def _of_session(self, session_id: str, account: Account, look: Callable[[], Any]) -> Any:
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
        self._owners.look()
        among, without = self._owners.readable(account)
        return filter._replace(among=among, without=without)

    def _told(self, session: dict[str, Any], pinned: frozenset[str], account: Account) -> dict[str, Any]:
        told = session | {"pinned": session["id"] in pinned}
        if account.owner is None:
            return told
        record = self._owners.of(session["id"])
        return told | {"owner": record and record.owner, "shared": bool(record and record.shared)}


def _may_read(record: Record | None, account: Account) -> bool:
    return account.may_read(record.owner, record.shared) if record else account.may_read(None)
