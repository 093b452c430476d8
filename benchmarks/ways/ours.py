"""This project's engine, with and without capture, and a plain loop of the same forwards."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import torch

from benchmarks.common.measuring import Run, Tokens, Way, synchronize, timed
from benchmarks.common.work import Work
from benchmarks.ways.storing import Store
from deployments.engine.edits import Edit
from deployments.engine.engine import Engine
from deployments.engine.request import Delta, Finished, Request
from deployments.model.kv_cache import PagedCache, TokenSpan
from deployments.model.model import Model
from deployments.points.capture import LAYERNORM_SITES, Capture

LAYERS = Capture(points=["layers.*.output"])
LAYERS_AND_NORMS = Capture(points=["layers.*.output", *(f"layers.*.{site}" for site in LAYERNORM_SITES)])
_ids = itertools.count()


def requests(model: Model, work: Work, capture: Capture | None = None, streamed: bool = False) -> list[Request]:
    """The work as the engine takes it, each time under ids of its own, and as nobody's that came before."""
    points = model.points.resolve(capture) if capture else ()
    common: dict[str, Any] = {"ignore_eos": True, "capture": capture, "points": points, "streamed": streamed}
    common["owner"] = f"turn {next(_ids)}"  # else its prompts would be those of the turn before, and not be run
    return [Request(f"r{next(_ids)}", prompt, work.new_tokens, **common) for prompt in work.prompts]


def engine(running: Engine, work: Work, capture: Capture | None = None, name: str = "engine") -> Way:
    """All requests at once; what is captured stays in memory."""

    def run() -> Tokens:
        return [list(done.tokens) for done in running.generate(requests(running.model, work, capture))]

    return Way(name, lambda: timed(run, work.device))


def engine_steered(running: Engine, work: Work, name: str) -> Way:
    """All requests at once, each adding a vector of its own to the output of the layer in the middle.

    The vectors are zeros, which take as long as any others, so that the tokens can be compared.
    """
    model = running.model
    (point,) = model.points.named(f"layers.{model.points.layer_count // 2}.output", "point")

    def run() -> Tokens:
        asked = requests(model, work)
        vectors = torch.zeros(len(asked), *point.shape, device=model.device)
        pairs = zip(asked, vectors, strict=True)
        steered = [dataclasses.replace(one, edits=(Edit(point, "add", vector=vector),)) for one, vector in pairs]
        return [list(done.tokens) for done in running.generate(steered)]

    return Way(name, lambda: timed(run, work.device))


def engine_storing(running: Engine, work: Work, capture: Capture, store: Store, name: str) -> Way:
    """All requests at once; the turn ends when the last captured row is durable."""

    def generate() -> Tokens:
        asked = requests(running.model, work, capture)
        done: dict[str, list[int]] = {}
        for request in asked:
            store.expect(request)
            running.submit(request)
        while len(done) < len(asked):
            for event in running.step(wait=True):
                store.take(running, event)
                if isinstance(event, Finished):
                    done[event.id] = list(event.tokens)
        store.wait()
        return [done[request.id] for request in asked]

    def run() -> Run:
        turn = timed(generate, work.device)
        store.forget()
        return turn

    return Way(name, run)


# ---- the bare loop


@dataclass(frozen=True)
class Forward:
    """One forward that the engine ran: which tokens, of which sequences, and the rows whose logits were wanted."""

    ids: Sequence[int]
    spans: Sequence[TokenSpan]
    wanted: Sequence[int]

    @property
    def decodes(self) -> bool:
        """Whether each sequence had one token."""
        return len(self.ids) == len(self.spans)

    def run(self, model: Model, cache: PagedCache) -> torch.Tensor:
        """Run it once more, on a cache of its own: [wanted, vocabulary] logits."""
        return model.forward(self.ids, self.spans, self.wanted, cache)


def forwards(running: Engine, work: Work) -> list[Forward]:
    """The forwards that the engine runs for this work, in order."""
    model, found = running.model, list[Forward]()
    run = model.forward

    def noting(ids: Any, spans: Any, wanted: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        # Copies: sequences' pages go to others later.
        found.append(copy.deepcopy(Forward(ids, spans, wanted)))
        return run(ids, spans, wanted, *args, **kwargs)

    with mock.patch.object(model, "forward", noting):
        running.generate(requests(model, work))
    return found


def cache_for(schedule: Sequence[Forward], running: Engine) -> PagedCache:
    """A cache with as many pages as these forwards name."""
    most = max(page for forward in schedule for span in forward.spans for page in span.kv.pages)
    return PagedCache(most + 1, like=running.cache)


def bare(running: Engine, work: Work) -> Way:
    """The engine's forwards in a loop with nothing around them but an argmax."""
    model, schedule = running.model, forwards(running, work)
    cache = cache_for(schedule, running)

    @torch.inference_mode()
    def run() -> Tokens:
        return [forward.run(model, cache).argmax(-1).tolist() for forward in schedule]

    def turn() -> Run:
        return dataclasses.replace(timed(run, work.device), outputs=())  # they are by forward, not by request

    return Way("bare loop of the same forwards", turn, f"{len(schedule)} forwards")


# ---- arrivals and gaps


def arriving(running: Engine, work: Work, within_s: Callable[[], float], name: str) -> Way:
    """Requests that arrive one by one; time in which none is running does not count.

    Args:
        running: The engine.
        work: What they generate.
        within_s: Seconds over which they arrive: as a Poisson process's given their number, the same each turn.
        name: The way's.
    """
    numbers = random.Random(0)
    shares = sorted(numbers.random() for _ in work.prompts)

    def run() -> Run:
        coming = list(zip((share * within_s() for share in shares), requests(running.model, work), strict=True))
        order, done = [request.id for _, request in coming], dict[str, list[int]]()
        began, idle, running_now = time.perf_counter(), 0.0, 0
        while len(done) < len(order):
            now = time.perf_counter() - began
            while coming and coming[0][0] <= now:
                running.submit(coming.pop(0)[1])
                running_now += 1
            if not running_now:
                time.sleep(coming[0][0] - now)
                idle += time.perf_counter() - began - now
                continue
            for event in running.step():
                if isinstance(event, Finished):
                    done[event.id] = list(event.tokens)
                    running_now -= 1
        synchronize(work.device)
        return Run.of([done[id] for id in order], time.perf_counter() - began - idle)

    return Way(name, run)


class Gap(NamedTuple):
    """From one token of a request to its next: engine steps between them, and seconds."""

    steps: int
    seconds: float


def gaps(running: Engine, work: Work, arrivals: Sequence[int]) -> list[Gap]:
    """The gaps between each request's tokens, over all requests.

    Args:
        running: The engine.
        work: What they generate.
        arrivals: [requests] the step before which each arrives.
    """
    coming = sorted(zip(arrivals, requests(running.model, work, streamed=True), strict=True), key=lambda pair: pair[0])
    last, found, left, step = dict[str, tuple[int, float]](), list[Gap](), len(coming), 0
    while left:
        while coming and coming[0][0] <= step:
            running.submit(coming.pop(0)[1])
        events = running.step()
        now = time.perf_counter()
        for event in events:
            if isinstance(event, Delta):
                if event.id in last:
                    before, then = last[event.id]
                    found.append(Gap(step - before, now - then))
                last[event.id] = step, now
            elif isinstance(event, Finished):
                left -= 1
        step += 1
    return found
