"""Measure the engine on a GPU: `python -m benchmarks.gpu`, which `benchmarks/gpu.md` describes."""

from __future__ import annotations

import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.case import Plan
from benchmarks.gpu.sections import SECTIONS, apart
from deployments.command_line import parser


def main(arguments: list[str] | None = None) -> int:
    """Run the sections, and write what each found; gives the exit status."""
    text = "Measure the engine on a GPU, with a check of its results. The exit status is 1 if a section or check fails."
    made = parser("benchmarks.gpu", text, "--size tiny")
    sizes = ("tiny", "qwen3-0.6b", "qwen3-8b")
    made.add_argument("--size", choices=sizes, action="append", help="repeatable (default: both Qwen3 shapes)")
    made.add_argument("--device", help="torch device (default: cuda, or cpu if the only size is tiny)")
    made.add_argument("--only", choices=SECTIONS, action="append", help="section to run; repeatable (default: all)")
    made.add_argument("--deadline", type=float, metavar="S", default=420, help="limit of all sections in seconds")
    made.add_argument("--json", type=Path, metavar="FILE", help="file for the results; other sections in it stay")
    options = made.parse_args(arguments)
    chosen: list[str] = options.size or list(sizes[1:])
    device = options.device or ("cpu" if chosen == ["tiny"] else "cuda")
    found: dict[str, Any] = {"device": device, "sections": {}}
    if options.json and options.json.exists():
        found = json.loads(options.json.read_text())
    ends, bad = time.monotonic() + options.deadline, False
    for name, size in itertools.product(SECTIONS, chosen):
        if name not in (options.only or SECTIONS) or (not SECTIONS[name].each_size and size != chosen[0]):
            continue
        left = min(SECTIONS[name].limit_s, ends - time.monotonic())
        title = f"{name}, {size}" if SECTIONS[name].each_size else name
        began = time.monotonic()
        outcome = apart(name, Plan(size, device), left)
        found["device"] = outcome.pop("device", found["device"])
        bad |= _is_bad(outcome)
        found["sections"][title] = outcome | {"seconds": round(time.monotonic() - began, 1)}
        print(json.dumps({title: found["sections"][title]}, indent=1), flush=True)
        if options.json:
            options.json.write_text(json.dumps(found))
    return int(bad)


def _is_bad(outcome: dict[str, Any]) -> bool:
    parts = [outcome, *(part for part in outcome.values() if isinstance(part, dict))]
    return any("error" in part or part.get("ok") is False for part in parts)


if __name__ == "__main__":
    sys.exit(main())
