"""The error of a request that a server rejects."""

from __future__ import annotations

import httpx


class ServerError(Exception):
    """An error answer of a server.

    Attributes:
        message: The server's message: what is wrong and what to do.
        status: The HTTP status.
        param: The wrong field, such as `capture.points[0]`; None if no field is at fault.
        code: The error code, such as `unknown_point`; None without one.

    Examples:
        >>> try:
        ...     server.generate("Ann has", temperature=7)
        ... except vitrine.ServerError as error:
        ...     print(error.status, error.param)
        400 temperature
    """

    def __init__(self, message: str, status: int, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message if param is None or message.startswith(param) else f"{param}: {message}")
        self.message = message
        self.status = status
        self.param = param
        self.code = code

    @classmethod
    def of(cls, answer: httpx.Response) -> ServerError:
        """The error in an answer."""
        try:
            error = answer.json()["error"]
            return cls(error["message"], answer.status_code, error.get("param"), error.get("code"))
        except (ValueError, KeyError, TypeError, AttributeError):
            message = f"{answer.url} answered {answer.status_code}, and is not a Vitrine server: {answer.text[:200]}"
            return cls(message, answer.status_code)
