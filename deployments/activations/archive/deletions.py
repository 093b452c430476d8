"""Deletions of sessions that the bucket does not know of yet, in the state's database."""

from __future__ import annotations

import json
from collections.abc import Collection

from deployments.activations.catalogue.manifest import Line
from deployments.activations.state.state import State


class Deletions(State):
    """Lines that are yet to be written to the bucket's manifest. Each change is durable when the call returns."""

    def add(self, line: Line) -> None:
        """Keep a line until it is in the manifest."""
        self.write("INSERT INTO bucket_deletions (line) VALUES (?)", [(json.dumps(line),)])

    def waiting(self) -> dict[int, Line]:
        """All lines by their numbers."""
        return {number: json.loads(line) for number, line in self.rows("SELECT id, line FROM bucket_deletions")}

    def end(self, numbers: Collection[int]) -> None:
        """These lines are in the manifest."""
        self.write("DELETE FROM bucket_deletions WHERE id = ?", [(number,) for number in numbers])
