"""The short text that a run ends with."""

import platform
from pathlib import Path
from typing import Any

from evals.config import in_ray_job
from evals.report import Recorded


def render(summary: dict[str, Any], directory: Path, example: Recorded | None) -> str:
    """The summary as aligned plain text, with the code that loads one recorded point."""
    model, dataset, problems = summary["model"], summary["dataset"], summary["counts"]["problems"]
    lines = ["", f"{model} on {dataset}, {problems} problems", ""]
    lines += [_table(summary["modes"])]
    lines += _difference(summary["with_tools_less_no_tools"])
    host = f" (on {platform.node()}, in a Ray job)" if in_ray_job() else ""
    lines += ["", f"results      {directory}{host}"]
    if summary["activations"]:
        lines += _activations(summary["activations"])
    if example:
        lines += ["", *_loading(example)]
    return "\n".join(lines)


def _table(modes: dict[str, Any]) -> str:
    head = ["mode", "accuracy", "95% interval", "flexible", "invalid", "truncated", "failed", "tokens/s"]
    head += ["p50 s", "p95 s"]
    rows = [head]
    for mode, m in modes.items():
        strict, latency = m["strict"], m["latency_s"]
        counts = [str(m["invalid"]), str(m["truncated"]), str(m["failed"])]
        row = [mode, _percent(strict["accuracy"]), _interval(strict["ci95"])]
        row += [_percent(m["flexible"]["accuracy"]), *counts, _number(m["tokens_per_second"], ".0f")]
        rows.append([*row, _number(latency["p50"], ".2f"), _number(latency["p95"], ".2f")])
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows
    )


def _difference(paired: dict[str, Any] | None) -> list[str]:
    if not paired or paired["difference"] is None:
        return []
    low, high = (100 * bound for bound in paired["ci95"])
    points = 100 * paired["difference"]
    return ["", f"tools add    {points:+.1f} points, 95% interval {low:+.1f} to {high:+.1f}, by problem"]


def _activations(recorded: dict[str, Any]) -> list[str]:
    where = recorded["where"] or ["nowhere: the server stored none"]
    runs, tokens, points = recorded["runs"], recorded["tokens"], len(recorded["points"])
    size = f"{recorded['bytes'] / 1e6:,.1f} MB"
    lines = [f"activations  {where[0]}" + (f" and {len(where) - 1} more" if len(where) > 1 else "")]
    lines += [f"             {runs} runs, {tokens:,} tokens, {points} points, {size}"]
    if recorded["not_stored"]:
        lines += [f"             {recorded['not_stored']} answers not stored: {recorded['statuses']}"]
    return lines


def _loading(example: Recorded) -> list[str]:
    return [
        "from deployments.activations import load",
        f'run = load("{example.uri}", run_id="{example.run_id}")',
        f'print(run["{example.point}"].shape)',
    ]


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}%"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _interval(bounds: list[float] | None) -> str:
    return "-" if bounds is None else f"{100 * bounds[0]:.1f} to {100 * bounds[1]:.1f}"
