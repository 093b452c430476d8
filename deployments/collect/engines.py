"""Runs examples through engines in Ray actors, with the store's writer and without HTTP."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import ray

from deployments.activations.actors.reader import connect_reader
from deployments.activations.actors.store import connect
from deployments.collect.examples import Example, Outcome, Settings
from deployments.engine.request import GREEDY
from deployments.job import Job
from deployments.messages import End, Refusal, RunReport
from deployments.options import Options

AT_ONCE = 512  # examples of an engine, so that it has work while the last runs are made durable


class Engines:
    """Engines of this cluster, which write to one store.

    Attributes:
        in_flight: The most examples to run at once.
    """

    def __init__(self, settings: Settings, options: Options, count: int) -> None:
        """Start the store and `count` engines with these options; returns once they have loaded the model.

        Raises:
            RayError: A model cannot be loaded (the text quotes a LoadError), or Ray fails.
        """
        self.in_flight = AT_ONCE * count
        self._settings = settings
        # A restarted engine would be killed by the same request.
        actor: Any = ray.remote(EngineActor).options(
            num_cpus=options.num_cpus, num_gpus=options.num_gpus, max_restarts=0, max_task_retries=0
        )
        self._engines = [actor.remote(options) for _ in range(count)]
        self._running = [0] * count  # examples
        # The reader reads the index that the store makes when it starts.
        ray.get(connect(options.activations_dir, options.archive, options.archive_cache_bytes).ready.remote())
        self._reader = connect_reader(options.activations_dir, options.archive)
        ray.get([engine.__ray_ready__.remote() for engine in self._engines])

    async def stored(self, names: Sequence[str]) -> set[str]:
        """Those of some examples' names that earlier commands have stored in the session."""
        return await self._reader.holding.remote(self._settings.session, list(names))  # type: ignore[no-any-return]

    async def send(
        self, examples: list[Example], outcome: Outcome, again: bool = False
    ) -> tuple[list[Example], Refusal]:
        """Run a request's examples on the engine that has the fewest, and count their runs, which are durable then.

        Returns:
            The examples of which there is no run, and the reason.
        """
        place = self._running.index(min(self._running))
        self._running[place] += len(examples)
        try:
            runs, refusal = await self._engines[place].run.remote(self._job(examples))
        finally:
            self._running[place] -= len(examples)
        for index, run in runs.items():
            outcome.add(examples[index].place, run.status, run.tokens, run.reason)
        return [example for index, example in enumerate(examples) if index not in runs], refusal

    def close(self) -> None:
        """End the engines."""
        for engine in self._engines:
            ray.kill(engine)

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


class EngineActor:
    """One engine."""

    def __init__(self, options: Options) -> None:
        """Load the model.

        Raises:
            LoadError: It cannot be loaded.
        """
        from deployments.replica.replica import ModelReplica

        self._replica = ModelReplica.func_or_class(options)  # type: ignore[attr-defined]  # the class: there is no Serve

    async def run(self, job: Job) -> tuple[dict[int, RunReport | None], Refusal]:
        """Run a job; its reported runs by the indices of their choices, and why there are no others."""
        messages = await self._replica.complete(job)
        refusals = [message for message in messages if isinstance(message, Refusal)]
        runs = {message.index: message.run for message in messages if isinstance(message, End)}
        return runs, refusals[0] if refusals else Refusal("the engine gave no answer")
