"""Links that download one thing once without a key, because a browser sends no key with its own downloads.

An application has one ingress, so its links are a table in that process. A signed token would need a table of used
tokens as well. Links end with the process.
"""

from __future__ import annotations

import secrets
import time
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

from deployments.accounts import Account
from deployments.activations.filters import Choice
from serve_app.http.budget import Budget
from serve_app.http.errors import ApiError

LASTS_S = 60.0
MOST_LINKS = 64  # unused links of an owner
SENT_BYTES = 128 << 20  # bytes of an owner's downloads sent at once, and of a single one


class Link(NamedTuple):
    """The download behind a link.

    Attributes:
        account: The account that made the link.
        choice: The chosen runs.
        tag: The download's tag.
    """

    account: Account
    choice: Choice
    tag: str


class Links:
    """Links by token. Use it on one event loop.

    Attributes:
        budgets: Owner -> memory of their downloads.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Initialize without links; `clock` returns seconds."""
        self.budgets = defaultdict[str | None, Budget](lambda: Budget(SENT_BYTES))
        self._clock = clock
        self._links: dict[str, tuple[float, Link]] = {}  # token -> expiry and link, the earliest expiry first

    def make(self, link: Link) -> str:
        """Add a link and return its token.

        Raises:
            ApiError: 429, the owner has too many unused links.
        """
        self._drop_ended()
        owner = link.account.owner
        if sum(other.account.owner == owner for _, other in self._links.values()) >= MOST_LINKS:
            message = f"{MOST_LINKS} unused download links exist: use one, or wait {LASTS_S:.0f} s"
            raise ApiError(429, message, None, "server_busy")
        token = secrets.token_urlsafe(32)
        self._links[token] = (self._clock() + LASTS_S, link)
        return token

    def take(self, token: str) -> Link:
        """Remove and return the link of a token; a token works once.

        Raises:
            ApiError: 404, the token was used, has expired, or is unknown.
        """
        self._drop_ended()
        if token not in self._links:
            message = f"this link was used, or is older than {LASTS_S:.0f} s: ask for another"
            raise ApiError(404, message, "token", "link_not_found")
        return self._links.pop(token)[1]

    def _drop_ended(self) -> None:
        now = self._clock()
        for token in [token for token, (end, _) in self._links.items() if end <= now]:
            del self._links[token]
