"""The sections of the benchmark, each in a process of its own, so that one that fails or hangs costs only itself."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from benchmarks.gpu.case import Found, Plan
from benchmarks.gpu.census import census
from benchmarks.gpu.machine import machine, tests
from benchmarks.gpu.speeds import batching, decode, prefill, variants, ways


class Section(NamedTuple):
    """A part of the benchmark.

    Attributes:
        run: Gives its findings, one after the other.
        limit_s: Seconds after which it is given up.
        each_size: Whether it runs once for each size.
    """

    run: Callable[[Plan], Found]
    limit_s: float
    each_size: bool = True


SECTIONS = {
    "machine": Section(machine, 40, each_size=False),
    "tests": Section(tests, 120, each_size=False),
    "census": Section(census, 40),
    "decode": Section(decode, 100),
    "prefill": Section(prefill, 60),
    "ways": Section(ways, 80),
    "variants": Section(variants, 120),
    "batching": Section(batching, 80),
}


def apart(name: str, plan: Plan, limit_s: float) -> dict[str, Any]:
    """What a section finds in a process of its own within a limit; with the reason if that is not all."""
    found: dict[str, Any] = {}
    if limit_s <= 5:
        return {"error": "left out: the deadline"}
    context = multiprocessing.get_context("forkserver")  # imports torch once; each child has a CUDA of its own
    context.set_forkserver_preload(["benchmarks.gpu.sections"])
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(name, plan, sender), daemon=True)
    child.start()
    sender.close()
    ends = time.monotonic() + limit_s
    try:
        while receiver.poll(max(0.0, ends - time.monotonic())):
            part = receiver.recv()
            if part is None:
                return found
            found |= part
        return found | {"error": f"not done after {limit_s:.0f} s"}
    except EOFError:
        child.join()
        return found | {"error": f"its process ended with {child.exitcode}"}
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid or 0, signal.SIGKILL)  # with the processes that it has started
        child.kill()  # if it has no group yet
        child.join()


def _child(name: str, plan: Plan, sender: Connection) -> None:
    os.setsid()
    cuda = torch.device(plan.device).type == "cuda"
    try:
        sender.send({"device": torch.cuda.get_device_name() if cuda else "cpu"})
        for part, value in SECTIONS[name].run(plan):
            sender.send({part: value})
    except Exception:  # noqa: BLE001 - the parent writes the reason, and goes on with the next section
        sender.send({"error": traceback.format_exc()[-3000:]})
    sender.send(None)
