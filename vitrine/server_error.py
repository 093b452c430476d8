"""Errors of requests to a server."""

from __future__ import annotations

from typing import Any

import httpx


class RequestFailed(Exception):
    """A request without a usable response; the text contains the reason.

    Attributes:
        status: The HTTP status; None without a response.
        param: The wrong field, such as `capture.points[0]`; None if no field is at fault.
        code: The error code, such as `unknown_point`; None without one.
    """

    def __init__(self, text: str, status: int | None = None, param: str | None = None, code: str | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.param = param
        self.code = code


class ServerError(RequestFailed):
    """An error that the server returned.

    Attributes:
        message: The server's message: what is wrong and what to do.

    Examples:
        >>> try:
        ...     server.generate("Ann has", temperature=7)
        ... except vitrine.ServerError as error:
        ...     print(error.status, error.param)
        400 temperature
    """

    status: int

    def __init__(self, message: str, status: int, param: str | None = None, code: str | None = None) -> None:
        param = param if isinstance(param, str) else None
        named = message if param is None or message.startswith(param) else f"{param}: {message}"
        super().__init__(f"HTTP {status}: {named}", status, param, code)
        self.message = message

    def __reduce__(self) -> tuple[type[ServerError], tuple[Any, ...]]:
        return type(self), (self.message, self.status, self.param, self.code)

    @classmethod
    def of(cls, answer: httpx.Response) -> ServerError:
        """The error in an answer."""
        if error := error_of(answer):
            return cls(str(error.get("message")), answer.status_code, error.get("param"), error.get("code"))
        return cls(f"{answer.text[:200]} (at {answer.url}, without OpenAI's error object)", answer.status_code)


class AnswerLate(RequestFailed, TimeoutError):
    """An answer that did not come within the client's or the server's time limit."""


class ServerAway(RequestFailed, ConnectionError):
    """A server that cannot be reached, or that a proxy answers for."""


def error_of(answer: httpx.Response) -> dict[str, Any] | None:
    """OpenAI's error object; None if the answer has none, like one of a proxy."""
    try:
        error = answer.json()["error"]
    except (ValueError, TypeError, KeyError):
        return None
    return error if isinstance(error, dict) else None
