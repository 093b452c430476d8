"""A benchmark's output: tables on the terminal, numbers as JSON, a picture."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import torch

matplotlib.use("Agg")  # no screen is needed
from matplotlib import pyplot

PACKAGES = ("torch", "transformers", "nnsight", "ray", "pyarrow")


@dataclass(frozen=True)
class Bar:
    """One bar of a picture: a median and the ends of its range, in the picture's unit."""

    label: str
    value: float
    lowest: float
    highest: float


def machine(threads: int, device: str) -> dict[str, Any]:
    """The platform, processor or GPU, number of cores and threads, and versions that this was measured with."""
    found: dict[str, Any] = {
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "threads": threads,
        "device": torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else _processor(),
    }
    return found | {name: importlib.metadata.version(name) for name in PACKAGES}


def _processor() -> str:
    capabilities = torch.cpu.get_capabilities()
    units = [unit for unit in ("amx_bf16", "avx512_bf16", "avx512_f", "avx2") if capabilities.get(unit)]
    return f"{capabilities.get('cpu_name', platform.processor())} ({', '.join(units)})"


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as text, columns aligned: the first to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in (head, *rows)
    ]
    return "\n".join([f"\n{title}", *lines])


def picture(path: Path, charts: Mapping[str, Sequence[Bar]], unit: str) -> None:
    """Draw a chart of horizontal bars for each title, with the range of the rounds.

    Args:
        path: Where the PNG goes.
        charts: Title -> bars.
        unit: What the bars measure.
    """
    heights = [1 + 0.35 * len(rows) for rows in charts.values()]
    figure, axes = pyplot.subplots(
        len(charts), 1, figsize=(10, sum(heights)), squeeze=False, gridspec_kw={"height_ratios": heights}
    )
    for axis, (title, rows) in zip(axes[:, 0], charts.items(), strict=True):
        values = [bar.value for bar in rows]
        errors = [[bar.value - bar.lowest for bar in rows], [bar.highest - bar.value for bar in rows]]
        drawn = axis.barh([bar.label for bar in rows], values, xerr=errors, color="#4477aa", ecolor="#999999")
        axis.bar_label(drawn, [f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in values], padding=6)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel(unit)
        axis.invert_yaxis()
        axis.margins(x=0.2)
    keep(path, figure)


def keep(path: Path, figure: Any) -> None:
    """Write a figure as a PNG."""
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def write(path: Path, found: Mapping[str, Any]) -> None:
    """Write results as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=2) + "\n")
