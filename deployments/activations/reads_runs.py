"""What the store tells of runs, and hands over of them: to each account what it may read.

What an account may not read is not there for it. A session may be deleted, and its name claimed by somebody else, while
it is looked at: so its record is compared before and behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from deployments.activations.accounts import OPERATOR, Account
from deployments.activations.failures import explain
from deployments.activations.filters import EVERYTHING, Filter
from deployments.activations.interventions import TokenChoice

if TYPE_CHECKING:  # Serve's controller and the ingress import this module too, and need no Arrow
    from deployments.activations.catalogue import Catalogue
    from deployments.activations.objects import AnyRoot
    from deployments.activations.owners import Owners, Record
    from deployments.activations.pins import Pins
    from deployments.activations.readings import Readings


class ReadsRuns:
    """What the store answers of stored runs."""

    _catalogue: Catalogue
    _owners: Owners
    _pins: Pins
    _readings: Readings
    _root: AnyRoot
    _rows_pool: ThreadPoolExecutor
    _data_pool: ThreadPoolExecutor

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

    async def begin_data(
        self,
        session_id: str,
        runs: Sequence[str] | None,
        points: Sequence[str] | None,
        format: str,
        account: Account = OPERATOR,
    ) -> tuple[str, int] | None:
        """Begin to hand over a session's data, as `Readings.begin`; None if there is no such session.

        Returns:
            The key that `more_data` and `end_data` take, and the number of bytes to come.

        Raises:
            RequestError: There is no such run or point, too much for one file, or no room for more at once.
            StoreError: The disk refuses.
        """

        def begun() -> tuple[str, int] | None:
            return self._readings.begin(session_id, runs, points, format)

        return await self._found(self._data_pool, self._of_session, session_id, account, begun)  # type: ignore[no-any-return]

    async def more_data(self, key: str) -> bytes:
        """The next bytes, at most `readings.PIECE`; nothing at the end.

        Raises:
            StoreError: The session was deleted meanwhile, nobody asked for long, or the disk refuses.
        """
        return await self._found(self._data_pool, self._readings.more, key)  # type: ignore[no-any-return]

    async def end_data(self, key: str) -> None:
        """Give up what is left to hand over; may come at any time."""
        self._readings.end(key)

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
