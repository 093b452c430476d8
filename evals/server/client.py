"""Chats with a server, many at once."""

from typing import Any

from evals.server.answers import RequestFailed
from evals.server.keys import api_key
from vitrine.connection.transport import Transport, json_object

PRESET = "X-Vitrine-Preset"  # header of an answer that a preset changed, and the preset among the answer's fields


class ChatClient(Transport):
    """Requests to `base_url`, which ends in `/v1`; they are sent again as `Transport` says."""

    def __init__(
        self,
        base_url: str,
        *,
        timeout: float,
        retries: int,
        parallel: int,
        max_outage: float = 0.0,
        key: str | None = None,
    ) -> None:
        """Arguments are those of `Transport`, with the key of the environment by default."""
        key = key or api_key()
        super().__init__(base_url, key, timeout, retries=retries, max_outage=max_outage, parallel=parallel)
        self._limit = "max_tokens"  # the field's name, as the server wants it

    async def chat(self, body: dict[str, Any]) -> dict[str, Any]:
        """The answer of `/chat/completions`.

        If the server rejects `max_tokens`, later requests have `max_completion_tokens` instead.

        Raises:
            AnswerLate: the answer took too long.
            RequestFailed: the server refused, was still busy at the last retry, or was away for too long.
        """
        named = {self._limit if name == "max_tokens" else name: value for name, value in body.items()}
        try:
            answer = await self._send("POST", "/chat/completions", json=named)
        except RequestFailed as refusal:
            reason = refusal.param, refusal.code
            if "max_tokens" not in named or reason != ("max_tokens", "unsupported_parameter"):  # its value is refused
                raise
            self._limit = "max_completion_tokens"
            return await self.chat(body)
        completion = json_object(answer)
        try:
            completion["choices"][0]["message"]["role"]
        except (TypeError, KeyError, IndexError) as error:
            raise RequestFailed(f"not a chat completion: {answer.text[:200]!r}") from error
        return completion | ({PRESET: answer.headers[PRESET]} if PRESET in answer.headers else {})

    async def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """The answer of `/completions`. Raises as `chat`."""
        return await self.post("/completions", body)

    async def read(self, path: str, **params: Any) -> dict[str, Any]:
        """The JSON object of a route. Raises as `chat`."""
        return await self.get(path, params)
