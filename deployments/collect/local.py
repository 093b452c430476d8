"""Examples through engines in Ray Data actors: no HTTP, and the store's own writer."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import uuid
from collections.abc import Coroutine, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from deployments.activations.store import connect
from deployments.collect.examples import Broken, Example, Fields, read
from deployments.collect.outcome import Outcome
from deployments.collect.settings import Settings
from deployments.engine.request import GREEDY
from deployments.messages import End, Job, Refusal
from deployments.options import Options

AT_ONCE = 32  # examples of a request


def outcomes(
    data: Path | Iterable[Mapping[str, Any]], fields: Fields, settings: Settings, options: Options, actors: int
) -> Iterator[Outcome]:
    """What becomes of each block of examples, as they finish, in any order.

    Args:
        data: A file on this node, or rows.
        fields: Which fields of a row mean what.
        settings: What is recorded.
        options: How each engine is loaded.
        actors: How many engines there are.
    """
    node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    reading = {"num_cpus": 0, "scheduling_strategy": node}
    blocks = ray.data.read_datasource(_Blocks(data, fields, settings.block), ray_remote_args=reading)
    collected = blocks.map_batches(
        EngineActor,
        fn_constructor_args=(settings, options),
        batch_size=None,
        batch_format="pyarrow",
        concurrency=actors,
        num_cpus=options.num_cpus,
        num_gpus=options.num_gpus,
    )
    for batch in collected.iter_batches(prefetch_batches=0, batch_size=None, batch_format="pyarrow"):
        for text in batch["outcome"].to_pylist():
            yield Outcome(**json.loads(text))


class _Blocks(Datasource):
    """Blocks of examples of one file, read by one task as they are needed."""

    def __init__(self, data: Path | Iterable[Mapping[str, Any]], fields: Fields, size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._data = data
        self._fields = fields
        self._size = size

    def estimate_inmemory_data_size(self) -> None:
        return None

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[ReadTask]:
        unknown = BlockMetadata(num_rows=None, size_bytes=None, input_files=None, exec_stats=None)
        return [ReadTask(self._read, unknown)]

    def _read(self) -> Iterator[pa.Table]:
        block: list[Example | Broken] = []
        for item in read(self._data, self._fields):
            block.append(item)
            if len(block) == self._size:
                yield _table(block)
                block = []
        if block:
            yield _table(block)


def _table(block: list[Example | Broken]) -> pa.Table:
    """A block as one row, which Ray Data neither splits nor joins with others."""
    items = [[*item] for item in block]
    return pa.table({"items": [json.dumps(items)]})


class EngineActor:
    """One engine, and what becomes of the blocks that it is given."""

    def __init__(self, settings: Settings, options: Options) -> None:
        """Load the model.

        Raises:
            LoadError: It cannot be loaded.
        """
        from deployments.replica import ModelReplica

        self._settings = settings
        self._store = connect(options.activations_dir)
        self._replica = ModelReplica.func_or_class(options)  # type: ignore[attr-defined]  # the class: there is no Serve
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="collect", daemon=True).start()

    def __call__(self, blocks: pa.Table) -> pa.Table:
        """Store the runs of each block's examples; durable when it answers."""
        results = []
        for text in blocks["items"].to_pylist():
            items = json.loads(text)
            outcome = Outcome(failures=[str(Broken(*item)) for item in items if len(item) == len(Broken._fields)])
            examples = [Example(*item) for item in items if len(item) == len(Example._fields)]
            self._wait(self._collect(examples, outcome))
            results.append(json.dumps(outcome.__dict__))
        return pa.table({"outcome": results})

    def _wait(self, coroutine: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _collect(self, examples: list[Example], outcome: Outcome) -> None:
        named = {self._settings.run_id(example): example for example in examples}
        stored = await self._store.holding.remote(self._settings.session, list(named))
        outcome.already_stored = len(examples) - len(named) + len(stored)
        # Prompts of like lengths share a forward.
        left = sorted((item for item in named.items() if item[0] not in stored), key=lambda item: len(item[1].prompt))
        texts = [item for item in left if isinstance(item[1].prompt, str)]
        together = [texts[first : first + AT_ONCE] for first in range(0, len(texts), AT_ONCE)]
        together += [[item] for item in left if not isinstance(item[1].prompt, str)]
        outcome.began = time.time()
        await asyncio.gather(*(self._run(dict(items), outcome) for items in together))
        outcome.ended = time.time()

    async def _run(self, named: dict[str, Example], outcome: Outcome) -> None:
        """Store some examples' runs; those of a request that is refused one by one, to find whose fault it is."""
        examples = list(named.values())
        messages = await self._replica.complete(self._job(list(named), examples))
        refused = next((message for message in messages if isinstance(message, Refusal)), None)
        if refused and len(examples) > 1:
            for run_id, example in named.items():
                await self._run({run_id: example}, outcome)
        elif refused:
            outcome.failures.append(f"{examples[0].place}: {refused.message}")
        else:
            for end in (message for message in messages if isinstance(message, End)):
                assert end.run is not None
                if end.run.status == "stored":
                    outcome.add(end.run.tokens)
                else:
                    outcome.failures.append(f"{examples[end.index].place}: {end.run.reason}")

    def _job(self, run_ids: list[str], examples: list[Example]) -> Job:
        prompt, settings = examples[0].prompt, self._settings
        return Job(
            id=uuid.uuid4().hex,
            messages=None if isinstance(prompt, str) else prompt,
            prompts=[example.prompt for example in examples if isinstance(example.prompt, str)],
            max_tokens=settings.max_tokens,
            sampling=GREEDY,
            capture=settings.capture(examples),
            session_id=settings.session,
            run_ids=tuple(run_ids),
        )
