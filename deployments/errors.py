"""RequestError for a bad request, with the field at fault, and LoadError for a model that cannot be loaded."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

LONGEST_NAME = 64  # characters; longer names are not compared with known ones, because that takes quadratic time


def nearest(name: str, known: Iterable[str]) -> str:
    """`: did you mean 'tokens'?`, to end a message about an unknown name; empty if no known name is similar.

    Args:
        name: The unknown name; above `LONGEST_NAME` characters it is not compared.
        known: A few dozen short names.
    """
    matches = difflib.get_close_matches(name, known, n=1, cutoff=0.7) if len(name) <= LONGEST_NAME else []
    return f": did you mean {matches[0]!r}?" if matches else ""


class RequestError(ValueError):
    """A request that cannot be served.

    Attributes:
        message: What is wrong and what to do, for the user.
        field: The path of the wrong field (`capture.points[0]`); None if no single field is wrong.
        code: A stable error code (`context_length_exceeded`).
        status: The HTTP status.
    """

    def __init__(self, message: str, field: str | None = None, code: str = "invalid_value", status: int = 400) -> None:
        # All four go to `args`, so that the error survives pickling.
        super().__init__(message, field, code, status)
        self.message = message
        self.field = field
        self.code = code
        self.status = status

    def __str__(self) -> str:
        return f"{self.field}: {self.message}" if self.field else self.message


class LoadError(RequestError):
    """A model cannot be loaded as requested.

    The only report of a replica that fails to start is its traceback, which Serve's status quotes: so the error's
    text is one line that `quoted` finds there and reads back.
    """

    _MARK = "cannot load the model: "

    def __str__(self) -> str:
        return self._MARK + json.dumps(self.args)

    @classmethod
    def quoted(cls, text: str) -> LoadError | None:
        """The last LoadError quoted in a text, if there is one."""
        _, mark, rest = text.rpartition(cls._MARK)
        if not mark:
            return None
        args, _ = json.JSONDecoder().raw_decode(rest)
        return cls(*args)


@contextmanager
def naming(number: int, count: int) -> Iterator[None]:
    """Name a prompt in errors if a job has several: `prompt[3]: ...`.

    Raises:
        RequestError: The block's error.
    """
    try:
        yield
    except RequestError as error:
        if count == 1:
            raise
        raise RequestError(f"prompt[{number}]: {error.message}", error.field, error.code, error.status) from error
