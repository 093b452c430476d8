"""Runs examples through engines in Ray actors, with the store's writer and without HTTP."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

import ray

from deployments.activations.actors.reader import connect_reader
from deployments.activations.actors.store import connect
from deployments.collect.examples import Example
from deployments.collect.work import Outcome, Settings
from deployments.engine.request import GREEDY
from deployments.job import Job
from deployments.messages import End, Refusal
from deployments.options import Options

AT_ONCE = 512  # examples of an engine, so that it has work while the last runs are made durable


class Engines:
    """Engines of this cluster, which write to one store.

    Attributes:
        in_flight: The most examples to run at once.
    """

    def __init__(self, settings: Settings, options: Options, count: int) -> None:
        """Start the engines, which load the model, and the store.

        Args:
            settings: The collection's settings.
            options: The options of each engine.
            count: The number of engines.
        """
        self.in_flight = AT_ONCE * count
        self._session = settings.session
        # A restarted engine would be killed by the same request.
        actor: Any = ray.remote(EngineActor).options(
            num_cpus=options.num_cpus, num_gpus=options.num_gpus, max_restarts=0, max_task_retries=0
        )
        self._engines = [actor.remote(settings, options) for _ in range(count)]
        self._running = [0] * count  # examples
        # The reader reads the index that the store makes when it starts.
        ray.get(connect(options.activations_dir, options.archive, options.archive_cache_bytes).ready.remote())
        self._reader = connect_reader(options.activations_dir, options.archive)

    async def stored(self, names: Sequence[str]) -> set[str]:
        """Those of some examples' names that earlier commands have stored in the session."""
        return await self._reader.holding.remote(self._session, list(names))  # type: ignore[no-any-return]

    async def run(self, examples: list[Example]) -> Outcome:
        """Run examples on the engine that has the fewest; their runs are durable when this returns."""
        place = self._running.index(min(self._running))
        self._running[place] += len(examples)
        try:
            return await self._engines[place].run.remote(examples)  # type: ignore[no-any-return]
        finally:
            self._running[place] -= len(examples)

    def close(self) -> None:
        """End the engines."""
        for engine in self._engines:
            ray.kill(engine)


class EngineActor:
    """One engine."""

    def __init__(self, settings: Settings, options: Options) -> None:
        """Load the model.

        Raises:
            LoadError: It cannot be loaded.
        """
        from deployments.replica.replica import ModelReplica

        self._settings = settings
        self._replica = ModelReplica.func_or_class(options)  # type: ignore[attr-defined]  # the class: there is no Serve

    async def run(self, examples: list[Example]) -> Outcome:
        """Store the runs of one request's examples; they are durable when this returns."""
        outcome = Outcome(began=time.time())
        await self._run(examples, outcome)
        outcome.ended = time.time()
        return outcome

    async def _run(self, examples: list[Example], outcome: Outcome) -> None:
        """Store the runs of some examples; after a rejected request, run the rest one by one to find the bad one."""
        messages = await self._replica.complete(self._job(examples))
        ends = {message.index: message for message in messages if isinstance(message, End)}
        for index, end in ends.items():
            assert end.run is not None
            outcome.add(examples[index].place, end.run.status, end.run.tokens, end.run.reason)
        refused = next((message for message in messages if isinstance(message, Refusal)), None)
        if refused and len(examples) == 1:
            outcome.refuse(examples[0].place, refused.message, refused.field, refused.status)
        elif refused:
            for index, example in enumerate(examples):
                if index not in ends and not outcome.refusal:
                    await self._run([example], outcome)

    def _job(self, examples: list[Example]) -> Job:
        prompt, settings, id = examples[0].prompt, self._settings, uuid.uuid4().hex
        return Job(
            id=id,
            messages=None if isinstance(prompt, str) else prompt,
            prompts=[example.prompt for example in examples if isinstance(example.prompt, str)],
            max_tokens=settings.max_tokens,
            sampling=GREEDY,
            capture=settings.capture(examples),
            session_id=settings.session,
            # Unique to an attempt: the store discards the unfinished runs of a killed one later.
            run_ids=tuple(f"{settings.name(example)}-{id[:8]}" for example in examples),
        )
