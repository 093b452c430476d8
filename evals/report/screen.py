"""The summary that an evaluation prints at its end."""

import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

from evals.config import CONTROL, in_ray_job
from evals.results.tally import unswept
from evals.scoring import RULES, Rule

REASONS = 3  # printed on the screen
STAR, LEVEL = "*", 0.05
COUNTED = ("invalid", "truncated", "timed_out", "failed")  # outcomes


def render(summary: dict[str, Any], directory: Path) -> str:
    """The summary as aligned plain text, with the code that loads one recorded point."""
    model, dataset, problems = summary["model"], summary["dataset"], summary["counts"]["problems"]
    lines = ["", f"{model} on {dataset}, {problems} problems", ""]
    lines += [_table(summary)]
    lines += ["", "by the other rules", "", _rules(summary)]
    plain = unswept(summary)
    compared = [pair for pair in summary["paired"] if pair["difference"] is not None and pair["b"] in plain]
    if pairs := [_difference(pair) for pair in compared]:
        lines += ["", "paired accuracy differences, in points", "", aligned(pairs)]
    lines += _sweep(summary)
    lines += _several(summary)
    lines += _reasoning(summary)
    if summary["not_paired"]:
        lines += ["", summary["not_paired"]]
    lines += ["", f"results      {where(directory)}", f"report       {directory / 'report.html'}"]
    if summary["activations"]:
        lines += _activations(summary["activations"])
        if summary["activations"]["example"]:
            lines += ["", *_loading(summary["activations"]["example"])]
    return "\n".join(lines)


def where(directory: Path) -> str:
    """The directory, with the host's name where the user may not know it."""
    return f"{directory} (on {platform.node()}, in a Ray job)" if in_ray_job() else str(directory)


def _table(summary: dict[str, Any]) -> str:
    rows = [["", *heads(summary["rule"]), "tokens/s"]]
    modes = dict(summary["modes"])
    for condition in unswept(summary).values():
        row = [_name(condition["mode"], condition["variant"]), *columns(condition, summary["rule"])]
        mode = modes.pop(condition["mode"], None)  # its speed is of all its variants: said once
        rows.append([*row, number(mode["tokens_per_second"], ".0f") if mode else ""])
    return aligned(rows)


def heads(rule: Rule) -> list[str]:
    """The heads of `columns`."""
    return [f"{rule} ±SE", "95% interval", *(kind.replace("_", " ") for kind in COUNTED), "tokens", "p50 s", "p95 s"]


def columns(condition: dict[str, Any], rule: Rule) -> list[str]:
    """A condition of a summary by a rule, as texts."""
    latency, outcomes = condition["latency_s"], condition["outcomes"]
    row = [score(condition[rule]), interval(condition[rule]["ci95"]), *(str(outcomes[kind]) for kind in COUNTED)]
    row += [number(condition["completion_tokens_per_sample"]["mean"], ".0f")]
    return row + [number(latency[quantile], ".2f") for quantile in ("p50", "p95")]


def _rules(summary: dict[str, Any]) -> str:
    """Accuracy by the rules that do not decide."""
    others = [rule for rule in RULES if rule != summary["rule"]]
    rows = [["", *(head for rule in others for head in (f"{rule} ±SE", "95% interval"))]]
    for c in unswept(summary).values():
        texts = (text for rule in others for text in (score(c[rule]), interval(c[rule]["ci95"])))
        rows.append([_name(c["mode"], c["variant"]), *texts])
    return aligned(rows)


def _sweep(summary: dict[str, Any]) -> list[str]:
    """Accuracy by layer and scale, with the difference to no steering, and a star where that is no chance."""
    lines = ["", f"steered, and the difference in points: {STAR} p < {LEVEL} by Holm"] if summary["sweep"] else []
    for of in summary["sweep"]:
        scales = ["steered" if scale is None else f"scale {scale:g}" for scale in of["scales"]]
        rows = [[_name(of["mode"], of["variant"]), *(head + "  " for head in scales)]]
        for row in of["rows"]:
            layer = "" if row["layer"] is None else f"layer {row['layer']}"
            rows.append([layer, *map(_steered, row["cells"])])
        lines += ["", aligned(rows)]
    return lines


def _steered(cell: dict[str, Any]) -> str:
    if cell["difference"] is None:
        return percent(cell["accuracy"]) + "  "
    star = STAR if cell["p_holm"] is not None and cell["p_holm"] < LEVEL else " "
    return f"{percent(cell['accuracy'])} {points(cell['difference']):>5} {star}"


def _several(summary: dict[str, Any]) -> list[str]:
    """Of several answers to each problem, pass@k and the accuracy of the majority."""
    conditions = [c for c in summary["conditions"].values() if c["epochs"]]
    rows = [
        [_name(c["mode"], c["variant"])]
        + [f"pass@{k} {percent(share)}" for k, share in c["epochs"]["pass_at"].items()]
        + [f"majority {score(c['epochs']['majority'])}"]
        for c in conditions
    ]
    return ["", aligned(rows)] if rows else []


def _reasoning(summary: dict[str, Any]) -> list[str]:
    """How much was thought."""
    lines = [
        f"{_name(c['mode'], c['variant'])}: {c['reasoning']['samples']} of {c['samples']} samples with reasoning, "
        f"{c['reasoning']['tokens']:,} tokens of them counted"
        for c in unswept(summary).values()
        if c["reasoning"]["samples"]
    ]
    return ["", *lines] if lines else []


def _difference(pair: dict[str, Any]) -> list[str]:
    a, b = (_name(*key.split(".")) for key in (pair["a"], pair["b"]))
    return [f"{b} - {a}", points(pair["difference"]), interval(pair["ci95"], points), chances(pair)]


def chances(pair: dict[str, Any]) -> str:
    """The p value of a difference, and the same for all of them."""
    return f"p = {pair['p']:.2g}, {pair['p_holm']:.2g} by Holm"


def _name(mode: str, variant: str) -> str:
    return mode if variant == CONTROL else f"{mode} {variant}"


def aligned(rows: list[list[str]]) -> str:
    """Rows as columns of text, the first to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows
    )


def _activations(recorded: dict[str, Any]) -> list[str]:
    where = recorded["where"] or ["nowhere: the server stored none"]
    runs, tokens, points = recorded["runs"], recorded["tokens"], len(recorded["points"])
    size = "bytes not known" if recorded["bytes"] is None else f"{recorded['bytes'] / 1e6:,.1f} MB"
    lines = [f"activations  {where[0]}" + (f" and {len(where) - 1} more" if len(where) > 1 else "")]
    lines += [f"             {runs} runs, {tokens:,} tokens, {points} points, {size}"]
    if recorded["not_stored"]:
        lines += [f"             {not_stored(recorded)}"]
    return lines


def not_stored(recorded: dict[str, Any]) -> str:
    """Of how many answers the activations are not known to be stored, and why."""
    reasons = [f"{reason} ({count})" for reason, count in recorded["why_not_stored"].items()]
    why = "; ".join(reasons[:REASONS]) + ("; and other reasons in summary.json" if len(reasons) > REASONS else "")
    many = f"{recorded['not_stored']} of {recorded['answers']} answers"
    return f"activations of {many} were not confirmed as stored: {why}"


def _loading(example: dict[str, str]) -> list[str]:
    return [
        "from vitrine import load",
        f'run = load("{example["uri"]}", run_id="{example["run_id"]}")',
        f'print(run["{example["point"]}"].shape)',
    ]


def percent(value: float | None) -> str:
    """A share as `12.3%`."""
    return "-" if value is None else f"{100 * value:.1f}%"


def score(by_rule: dict[str, Any]) -> str:
    """A rule's accuracy with its standard error, as `71.5% ±3.2`; of none or all right it is not known to be 0."""
    return percent(by_rule["accuracy"]) + (f" ±{100 * by_rule['stderr']:.1f}" if by_rule["stderr"] else "")


def number(value: float | None, form: str) -> str:
    """A number in a format of Python's."""
    return "-" if value is None else format(value, form)


def points(difference: float) -> str:
    """A difference of shares in points."""
    return f"{100 * difference:+.1f}"


def interval(bounds: list[float] | None, form: Callable[[float], str] = lambda share: f"{100 * share:.1f}") -> str:
    """The bounds of a share in percent, or of a difference in `points`."""
    return "-" if bounds is None else f"{form(bounds[0])} to {form(bounds[1])}"
