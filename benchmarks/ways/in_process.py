"""The engine without a server: the baseline for the cost of serving."""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.common import questions, settings
from benchmarks.common.measuring import Run, Way
from benchmarks.common.served import Workload
from benchmarks.common.work import Work
from benchmarks.ways import ours
from deployments.engine.engine import Engine
from deployments.engine.request import Delta, Finished
from deployments.model.load import load

ENGINE, STREAMING = "engine in process", "engine in process, streaming"


@dataclass(frozen=True)
class InProcessEngine:
    """An engine, and the work that it and servers are given."""

    engine: Engine
    work: Work
    texts: list[str]

    @classmethod
    def of(cls, directory: Path, name: str, options: argparse.Namespace) -> InProcessEngine:
        """Load a saved model."""
        running = Engine(load(str(directory), device="cpu"), max_running=max(64, options.requests))
        return cls(
            running, settings.work(name, options), questions.texts(questions.source(options.prompts), options.requests)
        )

    @property
    def workload(self) -> Workload:
        """The same work as requests to a server."""
        return Workload(self.texts, self.work.new_tokens, len(self.texts))

    @property
    def ways(self) -> list[Way]:
        """The engine's two ways: whole answers, and streamed ones."""
        return [self.way(streamed=False), self.way(streamed=True)]

    def way(self, streamed: bool) -> Way:
        """All requests at once; their text is put together as a server does it."""

        def run() -> Run:
            began = time.perf_counter()
            steps = self.steps(streamed)
            seconds = time.perf_counter() - began
            return Run(["".join(texts) for texts in steps], len(steps) * self.work.new_tokens, seconds)

        return Way(STREAMING if streamed else ENGINE, run)

    def steps(self, streamed: bool = True) -> list[list[str]]:
        """Each request's text, token by token, or all at once."""
        asked = ours.requests(self.engine.model, self.work, streamed=streamed)
        texts: dict[str, list[str]] = {request.id: [] for request in asked}
        for request in asked:
            self.engine.submit(request)
        left = len(asked)
        while left:
            for event in self.engine.step():
                if isinstance(event, Delta):
                    texts[event.id].append(event.text)
                if isinstance(event, Finished) and event.rest:
                    texts[event.id].append(event.rest.text)
                left -= isinstance(event, Finished)
        return list(texts.values())

    def first_token(self, prompt: list[int]) -> float:
        """Seconds from a lone request's arrival to its first token."""
        one = replace(self.work, prompts=[prompt], new_tokens=1)
        (request,) = ours.requests(self.engine.model, one)
        began = time.perf_counter()
        self.engine.submit(request)
        while not self.engine.step():
            pass
        return time.perf_counter() - began

    def step_seconds(self) -> float:
        """A decode step of all requests: the median gap between their tokens."""
        return statistics.median(gap.seconds for gap in ours.gaps(self.engine, self.work, [0] * len(self.texts)))
