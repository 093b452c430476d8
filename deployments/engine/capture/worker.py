"""The thread that brings recorded rows to their buffers."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import TypeVar

import torch

T = TypeVar("T")


def _result(result: Callable[[], object]) -> None:
    result()


class Worker:
    """Runs jobs one after another: on a thread of its own if it is `threaded`, or at once.

    All changes of a `CaptureBuffer` are jobs, so that a request's rows stay in order.
    """

    def __init__(self, post: Callable[[Callable[[], object]], None], threaded: bool) -> None:
        """Start nothing yet; the thread starts with the first job and ends with this object.

        `post` makes the engine's thread call a function.
        """
        self.threaded = threaded
        self._post = post
        self._thread = ThreadPoolExecutor(1, "capture") if threaded else None

    def run(self, job: Callable[[], T], then: Callable[[Callable[[], T]], object] = _result) -> Future[T] | None:
        """Run a job after all earlier ones.

        Args:
            job: What to run.
            then: Runs afterwards on the engine's thread. It calls its argument once, which returns the job's result or
                raises its error.

        Returns:
            What `wait` takes; None if the job has run.
        """
        if self._thread is None:
            then(job)
            return None
        running = self._thread.submit(torch.inference_mode()(job))
        running.add_done_callback(lambda done: self._post(partial(then, done.result)))
        return running

    def wait(self, job: Future[None] | None) -> None:
        """Wait for a job that `run` returned, if it has not run yet."""
        if job is not None:
            wait([job])

    def finish(self) -> None:
        """Wait for all jobs; what follows them is then posted."""
        self.wait(self.run(lambda: None))
