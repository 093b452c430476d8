"""Responses that are kept in the ingress's memory, for `previous_response_id` and `GET /v1/responses/{id}`."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from typing import Any, NamedTuple

from deployments.accounts import Account
from serve_app.http.errors import ApiError

MOST = 4096
MOST_BYTES = 128 << 20


class KeptResponse(NamedTuple):
    """A response as JSON, and its conversation with its answer as the chat template's messages, as JSON."""

    owner: str | None
    body: bytes
    messages: bytes

    @property
    def size(self) -> int:
        """The bytes that it counts as: at least so many that there is no room for more than `MOST`."""
        return max(MOST_BYTES // MOST, len(self.body) + len(self.messages))


class KeptResponses:
    """The responses of all owners; of too many, the least recently used of the owner with the most bytes leave."""

    def __init__(self) -> None:
        self._kept = OrderedDict[str, KeptResponse]()
        self._bytes = Counter[str | None]()  # by owner

    def keep(self, owner: str | None, response: dict[str, Any], messages: list[dict[str, Any]]) -> None:
        """Keep a response with its conversation."""
        kept = KeptResponse(owner, json.dumps(response).encode(), json.dumps(messages).encode())
        self._kept[response["id"]] = kept
        self._bytes[owner] += kept.size
        while self._bytes.total() > MOST_BYTES:
            [(most, _)] = self._bytes.most_common(1)
            self._remove(next(name for name, one in self._kept.items() if one.owner == most))

    def get(self, account: Account, response_id: str, field: str = "response_id", status: int = 404) -> KeptResponse:
        """A response; ApiError with this field and status if none is kept or it is another owner's."""
        kept = self._kept.get(response_id)
        if kept is None or not account.may_change(kept.owner):
            message = (
                f"there is no response {response_id[:128]!r}: responses are only in the server's memory, until newer "
                "ones replace them or the server restarts; to continue one, send its conversation as input"
            )
            raise ApiError(status, message, field, f"{field.removesuffix('_id')}_not_found")
        self._kept.move_to_end(response_id)
        return kept

    def delete(self, account: Account, response_id: str) -> None:
        """Remove a response; errors are those of `get`."""
        self.get(account, response_id)
        self._remove(response_id)

    def _remove(self, response_id: str) -> None:
        kept = self._kept.pop(response_id)
        self._bytes[kept.owner] -= kept.size
