"""Runs examples through engines in Ray Data actors, with the store's writer and without HTTP."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import uuid
import warnings
from collections.abc import Coroutine, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray.data
from ray.data import ActorPoolStrategy
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask
from ray.util.annotations import RayDeprecationWarning

from deployments.activations.actors.reader import connect_reader
from deployments.activations.actors.store import connect
from deployments.clusters import this_node
from deployments.collect.examples import Example, Fields, InvalidExample, read, together
from deployments.collect.outcome import Outcome
from deployments.collect.settings import Settings
from deployments.engine.request import GREEDY
from deployments.job import Job
from deployments.messages import End, Refusal
from deployments.options import Options

BLOCKS = 2  # of an engine at once, so that it has work while the last runs of a block are made durable
RECENT = 1 << 17  # names of the latest examples, to recognize repeated ones; more than all engines hold at once


def outcomes(
    data: Path | Iterable[Mapping[str, Any]], fields: Fields, settings: Settings, options: Options, actors: int
) -> Iterator[Outcome]:
    """The outcome of each block of examples, in the order in which they finish.

    Args:
        data: A file on this node, or rows.
        fields: Which fields of a row mean what.
        settings: The collection's settings.
        options: The options of each engine.
        actors: The number of engines.
    """
    blocks = ray.data.read_datasource(_Blocks(data, fields, settings), num_cpus=0, label_selector=this_node())
    blocks.context.target_max_block_size = 1  # byte: a block goes to an engine as soon as it is read
    with warnings.catch_warnings():
        # Restarts have no parameter yet. Without this, a block that kills its engine would be retried forever.
        warnings.simplefilter("ignore", RayDeprecationWarning)
        collected = blocks.map_batches(
            EngineActor,
            fn_constructor_args=(settings, options),
            batch_size=None,
            batch_format="pyarrow",
            compute=ActorPoolStrategy(
                size=actors, max_concurrent_calls_per_actor=BLOCKS, enable_true_multi_threading=True
            ),
            num_cpus=options.num_cpus,
            num_gpus=options.num_gpus,
            max_restarts=0,
            max_task_retries=0,
        )
    for batch in collected.iter_batches(prefetch_batches=0, batch_size=None, batch_format="pyarrow"):
        for text in batch["outcome"].to_pylist():
            yield Outcome(**json.loads(text))


class _Blocks(Datasource):
    """Blocks of examples of one file, read on demand by one task."""

    def __init__(self, data: Path | Iterable[Mapping[str, Any]], fields: Fields, settings: Settings) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._data = data
        self._fields = fields
        self._settings = settings

    def estimate_inmemory_data_size(self) -> None:
        return None

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[ReadTask]:
        unknown = BlockMetadata(num_rows=None, size_bytes=None, input_files=None, exec_stats=None)
        return [ReadTask(self._read, unknown)]

    def _read(self) -> Iterator[pa.Table]:
        items = self._once()
        while block := list(islice(items, max(1, self._settings.block // BLOCKS))):
            # As one row, which Ray Data cannot split.
            yield pa.table({"items": [json.dumps([item and [*item] for item in block])]})

    def _once(self) -> Iterator[Example | InvalidExample | None]:
        """The items; None for an example that was read shortly before, and may be in another engine now."""
        recent: dict[str, None] = {}
        for item in read(self._data, self._fields):
            name = self._settings.name(item) if isinstance(item, Example) else ""
            yield None if name in recent else item
            if name:
                recent[name] = None
            if len(recent) > RECENT:
                recent.pop(next(iter(recent)))


class EngineActor:
    """One engine, which runs blocks of examples."""

    def __init__(self, settings: Settings, options: Options) -> None:
        """Load the model.

        Raises:
            LoadError: It cannot be loaded.
        """
        from deployments.replica.replica import ModelReplica

        self._settings = settings
        self._reader = connect_reader(options.activations_dir, options.archive)
        self._replica = ModelReplica.func_or_class(options)  # type: ignore[attr-defined]  # the class: there is no Serve
        # The reader reads the index that the store makes when it starts.
        ray.get(connect(options.activations_dir, options.archive, options.archive_cache_bytes).ready.remote())
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="collect", daemon=True).start()

    def __call__(self, blocks: pa.Table) -> pa.Table:
        """Store the runs of each block's examples; durable when this returns."""
        results = []
        for text in blocks["items"].to_pylist():
            given = json.loads(text)
            items = [item for item in given if item]
            outcome = Outcome(already_stored=len(given) - len(items))
            outcome.failures += [
                str(InvalidExample(*item)) for item in items if len(item) == len(InvalidExample._fields)
            ]
            examples = [Example(*item) for item in items if len(item) == len(Example._fields)]
            self._wait(self._collect(examples, outcome))
            results.append(json.dumps(outcome.__dict__))
        return pa.table({"outcome": results})

    def _wait(self, coroutine: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _collect(self, examples: list[Example], outcome: Outcome) -> None:
        named = {self._settings.name(example): example for example in examples}
        stored = await self._reader.holding.remote(self._settings.session, list(named))
        outcome.already_stored += len(examples) - len(named) + len(stored)
        if requests := together(example for name, example in named.items() if name not in stored):
            outcome.began = time.time()
            await asyncio.gather(*(self._run(examples, outcome) for examples in requests))
            outcome.ended = time.time()

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
