"""The operator's monitors in a replica: their readouts for each request, and the file of what they have read."""

from __future__ import annotations

import itertools
import json
import logging
import os
import queue
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from logging.handlers import QueueListener, RotatingFileHandler
from pathlib import Path
from socket import gethostname
from typing import Any

from ray.util.metrics import Counter

from deployments.accounts import Exactly
from deployments.activations.files.disk import locked
from deployments.conditions import Monitor
from deployments.engine.request import Finished
from deployments.errors import RequestError
from deployments.job import Job
from deployments.permissions import private_directory
from deployments.places.points import Points
from deployments.readouts.monitors import MonitorSet, Watched
from deployments.readouts.resolver import NamedReadout, ReadoutCache, ReadoutResolver
from deployments.readouts.spec import AskedReadout
from deployments.replica.metrics import PREFIX

MOST_LINES = 4096  # that wait for the disk; further ones are dropped
FILE_BYTES = 64 << 20
MOST_FILES = 8


class Monitors:
    """Finds the monitors of each request. Their readouts may be replaced while the server runs."""

    def __init__(self, monitors: Sequence[Monitor], model: str, points: Points, readouts: ReadoutCache) -> None:
        """Those of the option `monitors` that are for the model of this name are attached."""
        self._monitors = {f"monitors.{i}": one for i, one in enumerate(monitors) if one.model in (None, model)}
        self._points, self._readouts = points, readouts
        self._last: MonitorSet | None = None

    async def of(self, job: Job) -> MonitorSet | None:
        """The monitors that a job's requests get; the same object while the readouts are the same.

        Raises:
            RequestError: A readout is not installed or does not fit; no request is then served without its monitor.
        """
        watched, resolvers = list[Watched](), dict[tuple[str, str | None], ReadoutResolver]()
        for field, monitor in self._monitors.items():
            name, owner = known = monitor.readout, monitor.owner
            try:
                if known not in resolvers:  # each takes a call of the store
                    held = await self._readouts.fetch(job.id, {name: NamedReadout(field, Exactly(owner))})
                    resolvers[known] = ReadoutResolver.of(self._points, held, [AskedReadout(name=name)])
                watched.append(Watched(monitor, *resolvers[known].value(monitor, field)))
            except RequestError as refused:
                message = (
                    f"the server's monitor {monitor.called!r} cannot read this request: {refused.message}; the option "
                    f"{field} defines it"
                )
                status = refused.status if refused.status == 429 else 503
                raise RequestError(message, None, "monitor_unavailable", status) from refused
        if watched and (self._last is None or self._last.watched != watched):
            self._last = MonitorSet(watched)
        return self._last


class _PrivateFile(RotatingFileHandler):
    """Makes its files readable by their user alone."""

    def _open(self) -> Any:
        return open(self.baseFilename, self.mode, encoding=self.encoding, opener=partial(os.open, mode=0o600))


class MonitorLog:
    """A file of JSON lines that another thread writes and rotates; what it cannot write in time is dropped."""

    def __init__(self, directory: str, model: str) -> None:
        """Open the first file of the directory that no other replica writes; OSError if it cannot be written."""
        self._model = model
        text = "Lines of the monitors' log that were not written."
        self._dropped = Counter(f"{PREFIX}monitor_lines_dropped_total", text, tag_keys=("model",))
        folder, name = Path(directory).expanduser(), f"{model.replace('/', '--')}.{gethostname()}"
        private_directory(folder)
        for number in itertools.count():
            with suppress(BlockingIOError):
                self._lock = os.fdopen(locked(folder / f".{name}.{number}.lock"), "w")
                break
        self._file = _PrivateFile(folder / f"{name}.{number}.jsonl", "a", FILE_BYTES, MOST_FILES - 1, "utf-8")
        setattr(self._file, "handleError", lambda _: self._drop())  # noqa: B010 - the disk fails
        self._lines: queue.Queue[logging.LogRecord] = queue.Queue(MOST_LINES)
        self._listener = QueueListener(self._lines, self._file)
        self._listener.start()

    def add(self, job: Job, run_id: str | None, event: Finished) -> None:
        """Queue the line of an answer; never waits."""
        line = {"time": time.time(), "request_id": job.request_id or job.id, "owner": job.account.owner}
        line |= {"model": self._model, "run_id": run_id, "finish_reason": event.reason}
        line["monitors"] = {result.name: result._asdict() for result in event.monitored}
        try:
            self._lines.put_nowait(logging.makeLogRecord({"msg": json.dumps(line)}))
        except queue.Full:
            self._drop()

    def close(self) -> None:
        """Write what waits, and end. Later calls do nothing."""
        if not self._lock.closed:
            self._lines.join()  # the end of the thread also needs room in the queue
            self._listener.stop()
            self._file.close()
            self._lock.close()

    def _drop(self) -> None:
        self._dropped.inc(1, {"model": self._model})
