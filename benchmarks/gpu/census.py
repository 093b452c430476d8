"""One decode step, counted: operations and syncs by line of code, launches and the GPU's own time."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu.case import Case, Found, Plan
from benchmarks.gpu.speeds import SAMPLED
from deployments.engine.engine import Engine

MOST_LINES = 40  # in a list
OURS = ("/deployments/", "/transformers/")


def census(plan: Plan) -> Found:
    """The counts for greedy requests, and for those that draw, with logprobs."""
    case = Case(plan)
    ways: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": SAMPLED, "all layers": {"points": ["layers.*.output"]}}
    for name, options in ways.items():
        yield name, _of(case, options)


def _of(case: Case, options: dict[str, Any]) -> dict[str, Any]:
    rows, lengths = case.plan.rows[1], next(iter(case.plan.contexts.values()))
    engine = case.engine(rows)
    for request in case.requests(rows, lengths, 64, **options):
        engine.submit(request)
    while engine.statistics.tokens < 8 * rows:  # prompts have run, libraries are warm, and a graph is captured
        engine.step()
    counted = _Operations()
    with counted:
        engine.step()
    found: dict[str, Any] = {
        "operations": sum(counted.by_line.values()),
        "by line": dict(counted.by_line.most_common(MOST_LINES)),
    }
    if torch.device(case.device).type == "cuda":
        found |= _syncs(engine) | _launches(engine)
    return found


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations that are no views, by the nearest line of the project or of transformers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.by_line: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns):
            frame: Any = sys._getframe(1)
            while frame and not any(part in frame.f_code.co_filename for part in OURS):
                frame = frame.f_back
            if frame:
                self.by_line[_place(frame.f_code.co_filename, frame.f_lineno)] += 1
        return func(*args, **(kwargs or {}))


def _place(file: str, line: int) -> str:
    return f"{'/'.join(file.split('/')[-2:])}:{line}"


def _syncs(engine: Engine) -> dict[str, Any]:
    """Operations of one step that wait for the GPU, as torch reports them."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found = Counter(_place(one.filename, one.lineno) for one in said if "synchroniz" in str(one.message))
    return {"syncs": sum(found.values()), "syncs by line": dict(found.most_common(MOST_LINES))}


def _launches(engine: Engine) -> dict[str, Any]:
    """Launches and copies of one step, and the time of its kernels."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        engine.step()
        torch.cuda.synchronize()
    events = list(profiled.key_averages())
    kernels = [one for one in events if str(one.device_type).endswith("CUDA")]
    kernels.sort(key=lambda one: -one.self_device_time_total)
    return {
        "launches": sum(one.count for one in events if "LaunchKernel" in one.key),
        "graphs": sum(one.count for one in events if "GraphLaunch" in one.key),
        "copies": sum(one.count for one in events if one.key == "cudaMemcpyAsync"),
        "kernels, ms": sum(one.self_device_time_total for one in kernels) / 1e3,
        "longest kernels, ms": {one.key[:80]: [one.count, one.self_device_time_total / 1e3] for one in kernels[:15]},
    }
