"""Problems in, samples out as they finish: Ray Data around a task that keeps all slots busy.

Ray Data's own async functions give results in the order of their inputs, wait at the end of each block, and stop their
event loop while the output is full. So one task has all problems and an event loop of its own, on which `parallel`
slots take the next problem as they become free. It gives, each second, all that has finished since: how many requests
are in flight does not depend on how fast results are taken.

Ray does not repeat a task whose process dies, since it would ask for everything again. A further round asks for what is
missing, which is what was in flight.
"""

import asyncio
import logging
import queue
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import cast

import pyarrow as pa
import pyarrow.compute as pc
import ray
from ray.data import DataContext
from ray.util.annotations import RayDeprecationWarning

from deployments.clusters import join, quiet_ray_data, this_node
from evals.config import Config, EvalError, Mode
from evals.server.client import ChatClient
from evals.server.inline import sampled_values
from evals.server.keys import api_key
from evals.task import steering
from evals.task.prompts import Prompts
from evals.task.trajectory import Problem, Sample, failed, run_problem, sample_key

ANY, NONE = -1, 0  # of Ray Data's tasks that may fail
ATTEMPT = pa.struct([("variant", pa.string()), ("epoch", pa.int32())])
logger = logging.getLogger(__name__)
MOST = 64  # samples of a block
RETRIES = 8  # further attempts of a request at a busy server
GATHER_S = 1.0  # seconds: each block costs Ray Data time and memory, on cores that the model may need


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
        ray.exceptions.RayError: The task died before it gave anything, twice.
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
    lost = ANY  # whether the task may die
    while count := sum(map(len, left.values())):
        asked = pa.array(([{"variant": v, "epoch": e} for v, e in each] for each in left.values()), pa.list_(ATTEMPT))
        for sample in _stream(problems.append_column("asked", asked), mode, config, prompts, lost):
            left[sample.id] = tuple(attempt for attempt in left[sample.id] if attempt != (sample.variant, sample.epoch))
            yield sample
        missing = sum(map(len, left.values()))
        assert missing < count or lost == ANY, "a task that does not die gives a sample of each problem"
        lost = NONE if missing == count else ANY  # what dies at once, twice, is no accident
        if missing:
            logger.warning("%d samples are missing since the task that asks died: they are asked for again", missing)


def _stream(work: pa.Table, mode: Mode, config: Config, prompts: Prompts, lost: int) -> Iterator[Sample]:
    """What one round gives; its task may die meanwhile where `lost` is `ANY`."""
    work = work.filter(pc.greater(pc.list_value_length(work["asked"]), 0)).combine_chunks()
    with warnings.catch_warnings():
        # Ray Data has no named parameter for retries yet.
        warnings.simplefilter("ignore", RayDeprecationWarning)
        # Not from_arrow, which measures its tables in a task that wants a CPU.
        results = ray.data.from_blocks([work]).map_batches(
            partial(roll_out, mode=mode, config=config, prompts=prompts, key=api_key()),
            batch_size=None,
            batch_format="pyarrow",
            num_cpus=0,  # the model's replicas may hold them all
            label_selector=this_node(),  # where the command runs, which surely reaches the server
            max_retries=0,
        )
    results.context.target_max_block_size = 1  # byte: whatever is given goes out at once
    results.context.max_errored_blocks = lost
    results.context.execution_no_progress_timeout_s = -1  # a server that is away is waited for
    # Without prefetching: it would keep each result until there is a next.
    for batch in results.iter_batches(prefetch_batches=0, batch_size=None, batch_format="pyarrow"):
        for texts in cast(pa.Table, batch)["samples"].to_pylist():
            yield from map(Sample.model_validate_json, texts)


def roll_out(
    work: pa.Table, mode: Mode, config: Config, prompts: Prompts, key: str | None = None
) -> Iterator[pa.Table]:
    """Runs a block of problems; each table has one row, the list of samples finished since the last, as JSON.

    Args:
        work: rows of `Problem`, each with the variants and epochs that are `asked` of it.
        mode: of all samples.
        config: the options.
        prompts: the texts.
        key: the server's, if it has one. It comes along, since the processes of a cluster that was there before have
            other environments.
    """
    finished: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    done = asyncio.run_coroutine_threadsafe(_work(work, mode, config, prompts, key, finished.put), loop)
    done.add_done_callback(lambda _: finished.put(None))
    try:
        ended = False
        while not ended:
            batch = _gathered(finished)
            ended = batch[-1] is None
            if samples := [text for text in batch if text is not None]:
                yield pa.table({"samples": pa.array([samples], pa.list_(pa.string()))})
        done.result()  # raises what the workers raised
    finally:
        loop.call_soon_threadsafe(loop.stop)  # nobody takes results any more: send nothing more


def _gathered(finished: queue.SimpleQueue[str | None]) -> list[str | None]:
    """What finishes within `GATHER_S` of the next to finish, up to `MOST`; None is the end, and comes at once."""
    batch = [finished.get()]
    until = time.monotonic() + GATHER_S
    while batch[-1] is not None and len(batch) < MOST and (left := until - time.monotonic()) > 0:
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
    key: str | None,
    give: Callable[[str], None],
) -> None:
    client = ChatClient(
        config.base_url,
        timeout=config.timeout,
        retries=RETRIES,
        parallel=config.parallel,
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
            give(text)

    try:
        async with asyncio.TaskGroup() as workers:
            for _ in range(config.parallel):
                workers.create_task(worker())
    finally:
        await client.close()


def _tasks(work: pa.Table) -> Iterator[tuple[Problem, str, int]]:
    """All variants and epochs of a problem, then those of the next."""
    for row in work.to_pylist():
        asked = row.pop("asked")
        for attempt in asked:
            yield Problem(**row), attempt["variant"], attempt["epoch"]
