"""Where a decode step's time goes, and how fast the hardware could do it."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.common.measuring import synchronize
from benchmarks.common.work import Work
from benchmarks.ways import ours
from deployments.engine import engine as engine_module
from deployments.engine.capture.ring import CaptureRing
from deployments.engine.decoding.text import TextStream
from deployments.engine.engine import Engine
from deployments.engine.request import GREEDY, Finished, Request, Rows, Sampling
from deployments.model import attention
from deployments.model.model import Model
from deployments.points.capture import Capture


@dataclass(frozen=True)
class Floor:
    """What one decode step takes at least, in seconds.

    Attributes:
        reading: All weights read once.
        products: Every linear layer's matrix product for the batch's rows, which reads its weights, too.
    """

    reading: float
    products: float

    @property
    def seconds(self) -> float:
        """The larger of the two: no step is faster than either."""
        return max(self.reading, self.products)


@torch.inference_mode()
def floor(model: Model, rows: int, device: str, repeats: int = 20) -> Floor:
    """Measure the least seconds of a decode step on this hardware, at this model's own sizes.

    Args:
        model: The model.
        rows: The batch of a decode.
        device: Where it is.
        repeats: How often; medians count.
    """
    hf = model.hf
    # As 32 bits whatever the dtype, so that adding up costs nothing beside reading.
    weights = torch.cat([weight.detach().flatten() for weight in hf.parameters()])
    words = weights[: weights.numel() // 2 * 2].view(torch.int32 if weights.element_size() == 2 else weights.dtype)
    words = words.view(torch.float32).nan_to_num_(0, 0, 0)
    linear = [module for module in hf.modules() if isinstance(module, torch.nn.Linear)]
    inputs = {
        size: torch.randn(rows, size, dtype=hf.dtype, device=device)
        for size in {module.in_features for module in linear}
    }

    def products() -> None:
        with model.fast_layers.turned_on():
            for module in linear:
                module.forward(inputs[module.in_features])

    return Floor(_median(lambda: words.sum(), device, repeats), _median(products, device, repeats))


def _median(work: Callable[[], Any], device: str, repeats: int) -> float:
    taken = []
    for _ in range(repeats + 2):
        synchronize(device)
        began = time.perf_counter()
        work()
        synchronize(device)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[2:])


# ---- the parts of a step

# What belongs to which part: a class or module, and the names of what is timed there.
PARTS: dict[str, list[tuple[Any, Sequence[str]]]] = {
    "forward": [(Model, ("forward",))],
    "sampling": [(engine_module, ("choose",))],
    "capture": [(CaptureRing, ("begin", "take", "end")), (Engine, ("_send_rows",))],
    "text": [(TextStream, ("add",))],
}
REST = "scheduling and the rest"


@dataclass
class Clock:
    """Time spent in named parts, each without what it calls of the others."""

    spent: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    _open: list[float] = field(default_factory=list)  # time of inner parts, by depth
    _device: str = "cpu"

    def timing(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with its time noted under a name."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._open.append(0.0)
            began = time.perf_counter()
            try:
                found = function(*args, **kwargs)
                synchronize(self._device)
                return found
            finally:
                taken = time.perf_counter() - began
                self.spent[name].append(taken - self._open.pop())
                if self._open:
                    self._open[-1] += taken

        return timed

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Time the engine's parts while open."""
        with contextlib.ExitStack() as patches:
            for name, places in PARTS.items():
                for owner, attributes in places:
                    for attribute in attributes:
                        timed = self.timing(name, getattr(owner, attribute))
                        patches.enter_context(mock.patch.object(owner, attribute, timed))
            yield


def breakdown(
    running: Engine, work: Work, steps: int, capture: Capture | None = None, sampling: Sampling = GREEDY
) -> dict[str, float]:
    """Seconds of a decode step in each part, by name, all of them summing to the step; means over `steps`.

    Args:
        running: The engine, with nothing to do.
        work: Whose prompts are run.
        steps: How many decodes are timed, after one that is not.
        capture: What all requests record.
        sampling: How all draw their tokens.
    """
    points = running.model.points.resolve(capture) if capture else ()
    for i, prompt in enumerate(work.prompts):
        length = steps + 50
        running.submit(Request(f"b{i}", prompt, length, sampling, ignore_eos=True, capture=capture, points=points))
    while running.statistics.running < len(work.prompts) or running.statistics.waiting:
        _step(running)
    _step(running)
    clock = Clock(_device=work.device)
    with clock.on():
        began = time.perf_counter()
        for _ in range(steps):
            _step(running)
        step = (time.perf_counter() - began) / steps
    for i in range(len(work.prompts)):
        running.cancel(f"b{i}")
    _step(running)
    parts = {name: sum(taken) / steps for name, taken in clock.spent.items()}
    return {**parts, REST: step - sum(parts.values())}


def _step(running: Engine) -> None:
    """One step, whose recorded rows go nowhere."""
    for event in running.step():
        if isinstance(event, Rows | Finished) and event.captured is not None:
            running.written(event.id, event.captured.bytes)


# ---- the parts of a forward

KINDS = {
    "matrix products": ("mm", "addmm", "bmm", "linear", "matmul", "mkldnn"),
    "attention": ("scaled_dot_product", "flash_attention", "efficient_attention", "softmax"),
    "writing keys and values": ("index_put", "index_copy"),
}
SMALL = "small operations"
KERNEL = "attention, compiled"


@dataclass(frozen=True)
class Operations:
    """One kind of operation within a step: how many, and the seconds they take in all."""

    count: float
    seconds: float


def operations(running: Engine, work: Work, steps: int = 5) -> dict[str, Operations]:
    """A decode forward's operations by kind, as torch's profiler sees them; the profiler slows small ones down."""
    schedule = [forward for forward in ours.forwards(running, work) if forward.decodes]
    schedule = [forward for forward in schedule if len(forward.ids) == len(work.prompts)][-steps:]
    cache, model = ours.cache_for(schedule, running), running.model
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (torch.device(work.device).type == "cuda")
    clock = Clock(_device=work.device)
    kernel = clock.timing(KERNEL, attention._by_kernel)  # which torch does not see
    with (
        mock.patch.object(attention, "_by_kernel", kernel),
        torch.inference_mode(),
        profile(activities=activities) as profiled,
    ):
        for forward in schedule:
            forward.run(model, cache)
    found: dict[str, Operations] = {}
    for event in profiled.key_averages():
        seconds = (event.self_device_time_total if len(activities) > 1 else event.self_cpu_time_total) / 1e6
        kind = next((kind for kind, names in KINDS.items() if any(name in event.key for name in names)), SMALL)
        before = found.get(kind, Operations(0, 0.0))
        found[kind] = Operations(before.count + event.count / len(schedule), before.seconds + seconds / len(schedule))
    if KERNEL in clock.spent:
        found[KERNEL] = Operations(len(clock.spent[KERNEL]) / len(schedule), sum(clock.spent[KERNEL]) / len(schedule))
    return found
