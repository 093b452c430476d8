"""Points probed in tasks of Ray, on any node that has the store at the same path."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import ray
from ray.exceptions import RayTaskError

from evals.config import EvalError
from evals.probes.fitting.fitting import FitJob, Outcome, probe_point


def probe_points(job: FitJob, points: Sequence[str], address: str) -> Iterator[list[Outcome]]:
    """The points' outcomes, in order.

    Args:
        job: The job.
        points: The points.
        address: The cluster's, `auto` for the one of this machine; not looked at where this process has joined one.

    Raises:
        EvalError: There is no such cluster, or as `probe_point` says.
    """
    joined = ray.is_initialized()
    try:
        if not joined:
            ray.init(address, log_to_driver=False)
    except (ConnectionError, ValueError) as error:
        raise EvalError(f"--ray {address}: {error}") from error
    try:
        shared, task = ray.put(job), ray.remote(num_cpus=1)(probe_point)
        for found in [task.remote(shared, point) for point in points]:
            yield ray.get(found)
    except RayTaskError as error:
        if isinstance(error.cause, EvalError):
            raise error.cause from None
        raise
    finally:
        if not joined:
            ray.shutdown()
