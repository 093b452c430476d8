"""Problems in, samples out as they finish: Ray Data around one task that keeps all slots busy.

Ray Data's own async functions give results in the order of their inputs, wait at the end of each block, and
stop their event loop while the output is full; its executor takes what is finished every 0.1 s. So the problems
are one block, in one task with an event loop of its own on which `parallel` workers take the next problem as
they become free. The task gives, each time, all that has finished since: how many requests are in flight never
depends on how fast results are taken.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import cast

import pyarrow as pa
import ray
from ray.data import DataContext

from evals.client import ChatClient
from evals.config import Config, EvalError, Mode
from evals.problems import this_node
from evals.trajectory import Problem, Sample, run_problem


def connect() -> None:
    """Joins the Ray cluster of RAY_ADDRESS or of this machine, else starts one; quiets its logs and bars.

    Raises:
        EvalError: the cluster does not answer.
    """
    if not ray.is_initialized():
        try:
            ray.init(namespace="vitrine", log_to_driver=False, logging_level=logging.ERROR)
        except ConnectionError as error:
            raise EvalError(f"{error}; does it want RAY_AUTH_MODE=token?") from error
    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    for handler in logging.getLogger("ray.data").handlers:
        if isinstance(handler, logging.StreamHandler):  # the other writes Ray's log file
            handler.setLevel(logging.CRITICAL)


def run_all(problems: Sequence[Problem], mode: Mode, config: Config) -> Iterator[Sample]:
    """One sample of each problem in one mode, in the order in which they finish.

    Raises:
        ray.exceptions.RayError: Ray could not run the task.
    """
    remaining = {problem.id: problem for problem in problems}
    while remaining:
        before = len(remaining)
        for sample in _stream(list(remaining.values()), mode, config):
            # If its process dies, Ray runs the task again and skips as many results as it had. Their order does
            # not repeat: some then come twice, and some are left for another round.
            if remaining.pop(sample.id, None):
                yield sample
        if len(remaining) == before:
            return


def _stream(problems: Sequence[Problem], mode: Mode, config: Config) -> Iterator[Sample]:
    items = ray.data.from_items([problem._asdict() for problem in problems], override_num_blocks=1)
    results = items.map_batches(
        partial(roll_out, mode=mode, config=config),
        batch_size=None,
        batch_format="pyarrow",
        num_cpus=0,  # the model's replicas may hold them all
        label_selector=this_node(),
    )
    results.context.target_max_block_size = 1  # byte: whatever is given goes out at once
    # Without prefetching: it would keep each result until there is a next.
    for batch in results.iter_batches(prefetch_batches=0, batch_size=None, batch_format="pyarrow"):
        for texts in cast(pa.Table, batch)["samples"].to_pylist():
            yield from map(Sample.model_validate_json, texts)


def roll_out(block: pa.Table, mode: Mode, config: Config) -> Iterator[pa.Table]:
    """Runs a block of problems; each table has one row, the list of samples finished since the last, as JSON."""
    problems = [Problem(**row) for row in block.to_pylist()]
    finished: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    work = asyncio.run_coroutine_threadsafe(_work(problems, mode, config, finished.put), loop)
    work.add_done_callback(lambda _: finished.put(None))
    try:
        ended = False
        while not ended:
            batch = [finished.get()]
            while not finished.empty():
                batch.append(finished.get())
            ended = batch[-1] is None
            if samples := [text for text in batch if text is not None]:
                yield pa.table({"samples": pa.array([samples], pa.list_(pa.string()))})
        work.result()  # raises what the workers raised
    finally:
        loop.call_soon_threadsafe(loop.stop)  # nobody takes results any more: send nothing more


async def _work(problems: Sequence[Problem], mode: Mode, config: Config, give: Callable[[str], None]) -> None:
    client = ChatClient(config.base_url, timeout=config.timeout, retries=config.retries, parallel=config.parallel)
    waiting = iter(problems)

    async def worker() -> None:
        for problem in waiting:  # shared: each worker takes the next one
            give((await run_problem(client.chat, problem, mode, config)).model_dump_json())

    try:
        async with asyncio.TaskGroup() as workers:
            for _ in range(config.parallel):
                workers.create_task(worker())
    finally:
        await client.close()
