"""Failures of requests."""

from vitrine.server_error import AnswerLate as AnswerLate
from vitrine.server_error import RequestFailed as RequestFailed
from vitrine.server_error import ServerAway


def is_absent(error: RequestFailed) -> bool:
    """Whether a server could not answer now, as one that is busy or starts, where it may have the route."""
    if error.status == 404:
        return isinstance(error, ServerAway) and "Path '" in str(error)  # Serve's proxy, without an application
    return isinstance(error, ServerAway | AnswerLate) or error.status in (408, 429)
