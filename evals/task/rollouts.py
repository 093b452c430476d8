"""Problems in, samples out as they finish: Ray Data around tasks that keep all slots busy.

Ray Data's own async functions give results in the order of their inputs, wait at the end of each block, and
stop their event loop while the output is full. So each of `workers` tasks has one block of the problems and an event
loop of its own, on which its part of the `parallel` slots take the next problem as they become free. A task gives, each
second, all that has finished since: how many requests are in flight does not depend on how fast results are taken,
until a slow reward leaves `BLOCKS` blocks of results untaken. Then tasks keep their results, and ask nothing more from
`WAITING` samples on, so that little is lost if the driver ends.
A pool of actors over blocks of a few problems would need eight times the CPU time: Ray Data takes milliseconds for each
block and each result.

Ray does not repeat a task whose process or node dies, since it would ask for the whole block again. A further round
asks for what is missing, which is what was in flight.
"""

import asyncio
import logging
import queue
import threading
import time
import warnings
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, cast

import pyarrow as pa
import pyarrow.compute as pc
import ray
from ray.data import DataContext
from ray.data._internal.execution.backpressure_policy import (
    ENABLED_BACKPRESSURE_POLICIES,
    ENABLED_BACKPRESSURE_POLICIES_CONFIG_KEY,
    BackpressurePolicy,
)
from ray.util.annotations import RayDeprecationWarning

from deployments.clusters import join, quiet_ray_data, this_node
from evals.config import Config, EvalError, Mode
from evals.server.client import ChatClient
from evals.server.inline import sampled_values
from evals.server.keys import api_key
from evals.task import steering
from evals.task.prompts import Prompts
from evals.task.trajectory import Problem, Sample, failed, run_problem, sample_key

if TYPE_CHECKING:
    from ray.data._internal.execution.interfaces import PhysicalOperator

ANY, NONE = -1, 0  # of Ray Data's tasks that may fail
ATTEMPT = pa.struct([("variant", pa.string()), ("epoch", pa.int32())])
logger = logging.getLogger(__name__)
WAITING = 64  # samples of a task that are finished and not in a block yet, and the most of a block
BLOCKS = 2  # that wait at the driver
GATHER_S = 1.0  # seconds: each block costs Ray Data time and memory, on cores that the model may need


class _HeldBack(BackpressurePolicy):
    """Takes no more blocks of the tasks while `BLOCKS` of them wait at the driver.

    No other policy limits how many Ray Data takes. A task whose blocks are not taken stands still
    in its `yield`.
    """

    def max_task_output_bytes_to_read(self, op: "PhysicalOperator") -> int | None:
        return 0 if self._topology[op].total_enqueued_output_blocks() >= BLOCKS else None


def connect() -> None:
    """Joins the Ray cluster of RAY_ADDRESS or of this machine, else starts one; quiets its logs and bars.

    Raises:
        EvalError: the cluster does not answer.
    """
    if not ray.is_initialized():
        try:
            join()
        except ConnectionError as error:
            raise EvalError(f"{error}; does it need RAY_AUTH_MODE=token?") from error
    quiet_ray_data()
    # Few tasks need no budgets, computed twenty times a second.
    DataContext.get_current().op_resource_reservation_enabled = False


def run_all(
    problems: pa.Table, mode: Mode, config: Config, prompts: Prompts, has: Callable[[str], bool] = lambda key: False
) -> Iterator[Sample]:
    """One sample of each problem in each variant in one mode, in the order in which they finish.

    Args:
        problems: rows of `Problem`.
        mode: of all these samples.
        config: the options.
        prompts: the texts.
        has: whether a sample of this key is there already.

    Raises:
        ray.exceptions.RayError: Tasks died before they gave anything, twice.
    """
    left = {
        problem: tuple(
            (variant, epoch)
            for epoch in range(1, config.epochs + 1)
            for variant in steering.asked(config)
            if not has(sample_key(problem, mode, variant, epoch))
        )
        for problem in problems["id"].to_pylist()
    }
    lost = ANY  # tasks that may die before the run does
    while count := sum(map(len, left.values())):
        asked = pa.array(([{"variant": v, "epoch": e} for v, e in each] for each in left.values()), pa.list_(ATTEMPT))
        for sample in _stream(problems.append_column("asked", asked), mode, config, prompts, lost):
            left[sample.id] = tuple(one for one in left[sample.id] if one != (sample.variant, sample.epoch))
            yield sample
        missing = sum(map(len, left.values()))
        assert missing < count or lost == ANY, "a task that does not die gives a sample of each problem"
        lost = NONE if missing == count else ANY  # what dies at once, twice, is no accident
        if missing:
            logger.warning("%d samples are missing since a worker died: they are asked for again", missing)


def _stream(work: pa.Table, mode: Mode, config: Config, prompts: Prompts, lost: int) -> Iterator[Sample]:
    """What one round gives; `lost` tasks may die meanwhile."""
    work = work.filter(pc.greater(pc.list_value_length(work["asked"]), 0)).combine_chunks()
    workers = min(config.workers, config.parallel, len(work))
    blocks = [work.take(pa.array(range(first, len(work), workers))) for first in range(workers)]
    with warnings.catch_warnings():
        # Ray Data has no named parameter for retries yet.
        warnings.simplefilter("ignore", RayDeprecationWarning)
        # Not from_arrow, which measures its tables in a task that wants a CPU.
        results = ray.data.from_blocks(blocks).map_batches(
            partial(
                roll_out, mode=mode, config=config, prompts=prompts, slots=config.parallel // workers, key=api_key()
            ),
            batch_size=None,
            batch_format="pyarrow",
            num_cpus=0,  # the model's replicas may hold them all
            # One worker runs where the command does, which surely reaches the server; several on any nodes.
            label_selector=this_node() if workers == 1 else None,
            max_retries=0,
        )
    results.context.target_max_block_size = 1  # byte: whatever is given goes out at once
    results.context.max_errored_blocks = lost
    results.context.execution_no_progress_timeout_s = -1  # a reward may take hours for a block, and holds all back
    policies = [*ENABLED_BACKPRESSURE_POLICIES, _HeldBack]
    results.context.set_config(ENABLED_BACKPRESSURE_POLICIES_CONFIG_KEY, policies)
    # Without prefetching: it would keep each result until there is a next.
    for batch in results.iter_batches(prefetch_batches=0, batch_size=None, batch_format="pyarrow"):
        for texts in cast(pa.Table, batch)["samples"].to_pylist():
            yield from map(Sample.model_validate_json, texts)


def roll_out(
    work: pa.Table, mode: Mode, config: Config, prompts: Prompts, slots: int, key: str | None = None
) -> Iterator[pa.Table]:
    """Runs a block of problems; each table has one row, the list of samples finished since the last, as JSON.

    Args:
        work: rows of `Problem`, each with the variants and epochs that are `asked` of it.
        mode: of all samples.
        config: the options.
        prompts: the texts.
        slots: requests in flight.
        key: the server's, if it has one. It comes along, since workers of a cluster that was there before have other
            environments.
    """
    finished: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    room = asyncio.Semaphore(WAITING)
    loop = asyncio.new_event_loop()

    async def give(text: str) -> None:
        await room.acquire()
        finished.put(text)

    threading.Thread(target=loop.run_forever, daemon=True).start()
    done = asyncio.run_coroutine_threadsafe(_work(work, mode, config, prompts, slots, key, give), loop)
    done.add_done_callback(lambda _: finished.put(None))
    try:
        ended = False
        while not ended:
            batch = _gathered(finished)
            ended = batch[-1] is None
            if samples := [text for text in batch if text is not None]:
                for _ in samples:
                    loop.call_soon_threadsafe(room.release)
                yield pa.table({"samples": pa.array([samples], pa.list_(pa.string()))})
        done.result()  # raises what the workers raised
    finally:
        loop.call_soon_threadsafe(loop.stop)  # nobody takes results any more: send nothing more


def _gathered(finished: queue.SimpleQueue[str | None]) -> list[str | None]:
    """What finishes within `GATHER_S` of the next to finish, up to `WAITING`; None is the end, and comes at once."""
    batch = [finished.get()]
    until = time.monotonic() + GATHER_S
    while batch[-1] is not None and len(batch) < WAITING and (left := until - time.monotonic()) > 0:
        try:
            batch.append(finished.get(timeout=left))
        except queue.Empty:
            break
    return batch


async def _work(
    work: pa.Table,
    mode: Mode,
    config: Config,
    prompts: Prompts,
    slots: int,
    key: str | None,
    give: Callable[[str], Awaitable[None]],
) -> None:
    client = ChatClient(
        config.base_url,
        timeout=config.timeout,
        retries=config.retries,
        parallel=slots,
        max_outage=config.max_outage,
        key=key,
    )
    waiting = _tasks(work)

    async def rolled_out(problem: Problem, variant: str, epoch: int) -> Sample:
        sample = await run_problem(client.chat, problem, mode, variant, config, prompts, epoch)
        if not config.inline_activations:
            return sample
        metas = [turn.activations for turn in sample.turns]
        values = await sampled_values(client, metas, config.inline_activations)
        return sample.model_copy(update={"activations": values or None})

    async def worker() -> None:
        for problem, variant, epoch in waiting:  # shared: each worker takes the next one
            try:
                text = (await rolled_out(problem, variant, epoch)).model_dump_json()
            except Exception as error:  # whatever one answer provokes must not end the others
                logger.exception("%s failed", sample_key(problem.id, mode, variant, epoch))
                reason = f"{type(error).__name__}: {error}".encode("ascii", "backslashreplace").decode()
                text = failed(problem, mode, variant, reason, epoch).model_dump_json()
            await give(text)

    try:
        async with asyncio.TaskGroup() as workers:
            for _ in range(slots):
                workers.create_task(worker())
    finally:
        await client.close()


def _tasks(work: pa.Table) -> Iterator[tuple[Problem, str, int]]:
    """All variants and epochs of a problem, then those of the next."""
    for row in work.to_pylist():
        asked = row.pop("asked")
        for one in asked:
            yield Problem(**row), one["variant"], one["epoch"]
