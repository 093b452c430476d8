"""One long recording, and the memory of the process meanwhile."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch

from benchmarks.common import measured_models
from benchmarks.ways import ours, storing
from benchmarks.ways.peers import Work
from deployments.engine.engine import Engine
from deployments.engine.request import Delta, Finished, Request
from deployments.model.model import Model
from deployments.options import Options
from deployments.points.capture import LAYERNORM_SITES, Capture

NORMS = Capture(points=[f"layers.*.{site}" for site in LAYERNORM_SITES])
EVERY_S = 0.05
KV_BYTES = 256 << 20


@dataclass(frozen=True)
class Scenario:
    """What runs while memory is watched.

    Attributes:
        name: How tables and pictures call it.
        model: Which model.
        prompt: Token ids of the long request.
        new_tokens: What it generates.
        capture: Whether it records both norms of every layer.
        disk: Bytes per second of an artificially slow disk; None for the real one's own speed.
        others: How many requests that record nothing run beside it all the while, 64 tokens each.
        directory: Where the store is made.
        threads: torch's.
    """

    name: str
    model: str
    prompt: list[int]
    new_tokens: int
    capture: bool
    disk: float | None
    others: int
    directory: Path
    threads: int


@dataclass
class MemorySample:
    """The memory of one scenario over time.

    Attributes:
        times: [samples] seconds since the request was sent.
        resident: [samples] bytes of resident memory but for keys and values, which grow with any request.
        held: [samples] bytes of recorded rows that the engine says are in memory.
        marks: What happened when.
        stored: Bytes on disk at the end.
        others: Tokens per second of the requests beside it.
    """

    times: list[float] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    marks: dict[str, float] = field(default_factory=dict)
    stored: int = 0
    others: float = 0.0

    @property
    def growth(self) -> int:
        """The most resident bytes beyond those at the start."""
        return max(self.resident) - self.resident[0]


def watch(scenario: Scenario) -> MemorySample:
    """Run a scenario; in a process of its own, so that no earlier one's memory counts."""
    torch.set_num_threads(scenario.threads)
    tokenizer = measured_models.tokenizer(scenario.model)
    model = Model(measured_models.build(scenario.model), tokenizer, scenario.model)
    engine = Engine(model, kv_bytes=KV_BYTES, capture_bytes=Options().capture_memory_bytes)
    engine.cache.touch()  # so that its resident memory can be separated from other memory
    slow = storing.slow_disk(scenario.disk) if scenario.disk else contextlib.nullcontext()
    with storing.store(scenario.directory) as store, slow:
        capture = NORMS if scenario.capture else None
        engine.generate(ours.requests(model, Work([scenario.prompt], 2), capture))  # what is made once is made
        return _run(scenario, engine, store, capture)


def _run(scenario: Scenario, engine: Engine, store: storing.Store, capture: Capture | None) -> MemorySample:
    seen = MemorySample()
    (long,) = ours.requests(engine.model, Work([scenario.prompt], scenario.new_tokens), capture, streamed=True)
    if capture:
        store.expect(long)
    beside = (Request(f"beside-{i}", scenario.prompt, 64, ignore_eos=True) for i in itertools.count())
    with _sampling(engine, seen) as began:
        engine.submit(long)
        for _ in range(scenario.others):
            engine.submit(next(beside))
        tokens = 0
        while "finished" not in seen.marks:
            for event in engine.step(wait=True):
                store.take(engine, event)
                now = time.perf_counter() - began
                if event.id == long.id:
                    if isinstance(event, Delta):
                        seen.marks.setdefault("prompt in", now)
                    elif isinstance(event, Finished):
                        assert event.reason == "length", event.error
                        seen.marks["finished"] = now
                elif isinstance(event, Delta):
                    tokens += 1
                elif isinstance(event, Finished):
                    engine.submit(next(beside))
        store.wait()
        seen.marks["stored"] = time.perf_counter() - began
        seen.others = tokens / seen.marks["finished"]
        seen.stored = store.bytes
    return seen


@contextlib.contextmanager
def _sampling(engine: Engine, seen: MemorySample) -> Iterator[float]:
    """Look at the process's memory all the while; gives the beginning on `perf_counter`."""
    process, done, began = psutil.Process(), threading.Event(), time.perf_counter()

    def sample() -> None:
        while True:
            seen.times.append(time.perf_counter() - began)
            seen.resident.append(process.memory_info().rss - engine.statistics.kv_budget_bytes)
            seen.held.append(engine.statistics.capture_bytes)
            if done.wait(EVERY_S):
                return

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield began
    finally:
        done.set()
        thread.join()
