"""What each owner of API keys uses: limits per minute, and counts for `/v1/usage`."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter, defaultdict
from datetime import UTC, datetime
from typing import Any

from deployments.accounts import Account
from deployments.activations.facts import StoreError
from deployments.options import Options
from serve_app.backend.client_data import stored
from serve_app.http.errors import UNAVAILABLE, ApiError

SEND_S = 1.0  # for which counts are gathered before the store gets them

logger = logging.getLogger("ray.serve")


class Bucket:
    """An allowance of so many units a minute, which refills steadily up to one minute's; what is used may exceed it."""

    def __init__(self, per_minute: int) -> None:
        self.per_minute, self._left, self._at = per_minute, float(per_minute), time.monotonic()

    def take(self, amount: int) -> float:
        """Use some of it; returns what is left, negative if more was used."""
        now = time.monotonic()
        self._left = min(self.per_minute, self._left + (now - self._at) * self.per_minute / 60) - amount
        self._at = now
        return self._left

    def wait_s(self, amount: int) -> int:
        """Whole seconds until so much is left; 0 if it is now."""
        return max(0, math.ceil((amount - self.take(0)) * 60 / self.per_minute))


class Usage:
    """Limits and counts of one ingress, by owner. They cost nothing per token: a request is counted at its end."""

    def __init__(self, options: Options, store: Any) -> None:
        """Use the operator's limits, and the activation store's handle, which keeps the counts."""
        limits = {"requests": options.requests_per_minute, "tokens": options.tokens_per_minute}
        self._buckets = defaultdict[str | None, dict[str, Bucket]](
            lambda: {kind: Bucket(limit) for kind, limit in limits.items() if limit}
        )
        self._store = store
        self._counts = defaultdict[tuple[str, str], Counter[str]](Counter)  # not sent yet; by day and owner
        self._sending: asyncio.Task[None] | None = None

    def admit(self, owner: str | None) -> dict[str, str]:
        """Take a request's place in its owner's minute; returns headers for the answer.

        Raises:
            ApiError: 429, with the seconds to wait.
        """
        buckets = self._buckets[owner]
        for kind, bucket in buckets.items():
            if wait := bucket.wait_s(kind == "requests"):  # tokens are known only afterwards
                message = f"the limit of {bucket.per_minute} {kind} a minute is reached: try again in {wait} s"
                headers = {"Retry-After": str(wait)} | _headers(buckets)
                raise ApiError(429, message, None, "rate_limit_exceeded", headers)
        if "requests" in buckets:
            buckets["requests"].take(1)
        return _headers(buckets)

    def charge(self, owner: str | None, prompt_tokens: int, completion_tokens: int, requests: int = 1) -> None:
        """Count a request that has ended, or tokens of one that was counted."""
        if bucket := self._buckets[owner].get("tokens"):
            bucket.take(prompt_tokens + completion_tokens)
        counts = self._counts[f"{datetime.now(UTC):%Y-%m-%d}", owner or ""]
        counts.update(requests=requests, prompt_tokens=prompt_tokens, completion_tokens=completion_tokens)
        if self._sending is None:
            self._sending = asyncio.ensure_future(self._send_soon())

    async def totals(self, account: Account, period: str) -> list[dict[str, Any]]:
        """As `UsageFiles.totals`; ApiError 503 if the store does not answer."""
        return await stored(self._store.client_data.remote("usage", "totals", period, account))  # type: ignore[no-any-return]

    async def _send_soon(self) -> None:
        await asyncio.sleep(SEND_S)
        self._sending = None
        await self.send()

    async def send(self) -> None:
        """Send what is gathered to the store; what it does not take is sent with the next requests'."""
        sent = dict(self._counts)
        self._counts.clear()
        try:
            await stored(self._store.client_data.remote("usage", "put", sent))
        except (ApiError, StoreError, *UNAVAILABLE) as error:
            logger.warning("the usage of %d owners is not stored yet: %s", len(sent), error)
            for key, counts in sent.items():
                self._counts[key].update(counts)


def _headers(buckets: dict[str, Bucket]) -> dict[str, str]:
    """OpenAI's headers of what is left."""
    return {f"x-ratelimit-remaining-{kind}": str(max(0, int(bucket.take(0)))) for kind, bucket in buckets.items()}
