"""Failures of requests: what an answer that is no success means for another attempt, and why it failed."""

import math
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Literal

import httpx

LONGEST_WAIT = 600.0  # seconds that a server may ask to wait
NO_REPLICA, NOT_STARTED = "unavailable", "not_started"  # codes of a 504 of Vitrine's for which no model worked
Kind = Literal["refused", "busy", "away"]


class RequestFailed(Exception):
    """A request that has no answer, after its retries; the text says why.

    Attributes:
        error: OpenAI's error object, where the server refused with one.
    """

    def __init__(self, text: str, error: dict[str, Any] | None = None) -> None:
        super().__init__(text)
        self.error = error or {}


class AnswerLate(RequestFailed):
    """An answer that did not come within the time that the client or the server allows one."""


def kind_of(response: httpx.Response) -> Kind:
    """What an answer that is no success means for another attempt.

    Returns:
        `refused`: it would fail again; `busy`: the server is there, and may answer later; `away`: it is not there.
    """
    status, error = response.status_code, error_of(response)
    if status in {408, 429} or (status == 504 and error and error.get("code") != NO_REPLICA):
        return "busy"
    # While an application goes down or is not up yet, Serve's proxy answers in plain text.
    plain = not response.headers.get("Content-Type", "").startswith("application/json")
    return "away" if status in {502, 503, 504} or (plain and status in {404, 500}) else "refused"


def is_late(response: httpx.Response) -> bool:
    """Whether the model worked on an answer until the server's own time limit was over."""
    error = error_of(response)
    return response.status_code == 504 and error is not None and error.get("code") not in {NO_REPLICA, NOT_STARTED}


def error_of(response: httpx.Response) -> dict[str, Any] | None:
    """OpenAI's error object; None where the answer has none, as a proxy's own."""
    try:
        error = response.json()["error"]
    except (ValueError, TypeError, KeyError):
        return None
    return error if isinstance(error, dict) else None


def message_of(response: httpx.Response) -> str:
    """OpenAI's error message, or the body where a proxy answered in plain text."""
    message = (error_of(response) or {}).get("message")
    return response.text[:200] if message is None else str(message)


def asked_wait_s(response: httpx.Response) -> float:
    """Seconds that the server asks to wait: it may give a number or a date."""
    value = response.headers.get("Retry-After", "0")
    try:
        return min(LONGEST_WAIT, float(value)) if math.isfinite(float(value)) else 0.0
    except ValueError:
        pass
    try:
        return min(LONGEST_WAIT, (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):
        return 0.0


def is_absent(response: httpx.Response) -> bool:
    """Whether a server could not answer now, as one that is busy or starts, where it may have the route."""
    if response.status_code == 404:
        return response.text.startswith("Path '")  # Serve's proxy, before there is an application
    return kind_of(response) != "refused"
