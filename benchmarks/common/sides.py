"""Two engines whose steps take turns, so that a machine that slows down does so for both."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Sequence

from deployments.engine.engine import Engine
from deployments.engine.request import Finished, Request

_ids = itertools.count()


class Side:
    """An engine and the requests that it runs, timed by itself.

    Attributes:
        seconds: That its steps took.
        tokens: Of its prompts and answers that have ended.
        left: Requests that have not ended.
    """

    def __init__(self, engine: Engine, requests: Sequence[Request]) -> None:
        turn = f"turn {next(_ids)}"  # each turn runs its prompts, and shares none with an earlier one
        self._engine = engine
        self.seconds, self.tokens, self.left = 0.0, 0, len(requests)
        for one in requests:
            engine.submit(dataclasses.replace(one, id=f"r{next(_ids)}", owner=turn))

    def step(self) -> None:
        """Run a step, if anything is left."""
        if not self.left:
            return
        began = time.perf_counter()
        ended = [event for event in self._engine.step(wait=True) if isinstance(event, Finished)]
        self.seconds += time.perf_counter() - began
        self.tokens += sum(len(event.prompt) + len(event.tokens) for event in ended)
        self.left -= len(ended)


def ratio(ours: Side, base: Side) -> float:
    """Tokens a second of one over those of the other, from the first prompt's row to the last token's.

    They take turns step by step, so that a machine that slows down does so for both.
    """
    turns = itertools.cycle(((base, ours), (ours, base)))
    while ours.left or base.left:
        for side in next(turns):
            side.step()
    return ours.tokens / ours.seconds * base.seconds / base.tokens
