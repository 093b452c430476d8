"""Turns a model's replaced layers on and off."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Switch:
    """Whether layers of a model run the engine's functions, or as in transformers: clients' code differentiates those.

    Attributes:
        on: Whether they run the engine's.
    """

    def __init__(self) -> None:
        self.on = False

    @contextmanager
    def turned_on(self) -> Iterator[None]:
        """Run the engine's functions while open."""
        before, self.on = self.on, True
        try:
            yield
        finally:
            self.on = before
