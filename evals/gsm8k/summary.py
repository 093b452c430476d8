"""The results of an evaluation: summary.json, made of the directory's config.json and samples alone, and the rest."""

from collections import Counter
from datetime import UTC, datetime
from itertools import chain, product
from pathlib import Path
from typing import Any

from evals.activations_meta import runs_of, why_not_stored
from evals.config import CONTROL, Config, EvalError, Mode
from evals.report.page import write_report
from evals.results.results import (
    FOLDER,
    TRANSFER_FILE,
    read_config,
    read_json,
    read_samples,
    write_dataset,
    write_json,
    write_table,
    write_views,
)
from evals.results.tally import ActivationTally, ConditionTally, ModeTally
from evals.results.transfer import transfer, transferred_runs
from evals.stats import covered, holm, paired_difference
from evals.task.steering import asked, cells, layers

NOT_PAIRED = f"no variant is compared with {CONTROL}, which was not among --variants"
Conditions = dict[tuple[Mode, str], ConditionTally]


def conclude(directory: Path, incomplete: str | None, base_url: str | None = None) -> dict[str, Any]:
    """Writes all that is made of an evaluation's samples, summary.json first and report.html last.

    Recorded activations are transferred first where the evaluation asks for it and they are not all there.

    Args:
        directory: the results, with config.json and samples.
        incomplete: why the evaluation ended early, if it did.
        base_url: of the server with the activations; without it that of config.json.

    Returns:
        the summary. Where the transfer failed, `incomplete` says why.

    Raises:
        EvalError: the directory holds no evaluation.
    """
    summary, config = summarize(directory, incomplete), read_config(directory)
    recorded = summary["activations"]
    if config.transfer_activations and recorded["runs"] and not incomplete:
        try:
            if not recorded["transferred"]:
                transfer(directory, base_url or config.base_url, config.session_id)
            if lacking := _lacking(directory, config.session_id):
                incomplete = f"{lacking} of {recorded['runs']} recorded runs are not on the server any more"
        except EvalError as error:
            incomplete = str(error)
        except KeyboardInterrupt:
            incomplete = "interrupted"
        summary = summarize(directory, incomplete)
    write_json(directory / "summary.json", summary)
    write_dataset(directory)
    write_table(directory, list(config.rewards))
    write_views(directory)
    write_report(directory)
    return summary


def summarize(directory: Path, incomplete: str | None) -> dict[str, Any]:
    """The contents of summary.json: the same whether an evaluation went through or was resumed.

    Args:
        directory: the results, with config.json and samples.
        incomplete: why the evaluation ended early, if it did.

    Returns:
        model: The model's id.
        dataset: The option `dataset`.
        rule: The rule that decides what is correct.
        counts: `problems`, `conditions`, `samples`, `failed` and `missing` samples.
        incomplete: Why the evaluation is not complete; null if it is.
        conditions: The counts of each condition, by `<mode>.<variant>`.
        modes: `samples`, `completion_tokens`, `wall_s` and `tokens_per_second` by mode, without pauses.
        paired: Each comparison: `a`, `b`, `kind` (`variant`, `mode`, `steering`), `problems`, `difference`, `ci95`,
            `only_a` and `only_b` (problems that one side solves more often), `p`, `p_holm`.
        sweep: For each mode and variant, `scales` and `rows` of cells by layer (`accuracy`, `difference`, `p_holm`).
        not_paired: Why variants are not compared, if they are not.
        activations: What was stored; null without `collect_activations`.
        config: The options, as in config.json.
        versions: The evaluator's versions, as in config.json.
        times: `started`, `ended`, and `seconds` without pauses.

    Raises:
        EvalError: the directory holds no evaluation, or one of an earlier version.
    """
    facts, config = read_json(directory / "config.json"), read_config(directory)
    conditions: Conditions = {
        (mode, variant): ConditionTally(config.rule) for mode in config.modes for variant in asked(config)
    }
    modes = {mode: ModeTally() for mode in config.modes}
    activations = ActivationTally(config.session_id) if config.collect_activations else None
    for sample in read_samples(directory):
        conditions[sample.mode, sample.variant].add(sample)
        modes[sample.mode].add(sample)
        if activations:
            activations.add(sample)
    counts = _counts(conditions, facts["dataset"]["problems"], config.epochs)
    return {
        "model": config.model,
        "dataset": config.dataset,
        "rule": config.rule,
        "counts": counts,
        "incomplete": "; ".join(_reasons(incomplete, counts["missing"], conditions)) or None,
        "conditions": {
            f"{mode}.{variant}": {"mode": mode, "variant": variant} | tally.summary()
            for (mode, variant), tally in conditions.items()
        },
        "modes": {mode: tally.summary() for mode, tally in modes.items()},
        "paired": (paired := _paired(conditions, config)),
        "sweep": _sweep(conditions, paired, config),
        "not_paired": None if CONTROL in config.variants else NOT_PAIRED,
        "activations": activations.summary() | {"transferred": _transferred(directory)} if activations else None,
        "config": facts["config"],
        "versions": facts["versions"],
        "times": _times(list(modes.values())),
    }


def _reasons(incomplete: str | None, missing: int, conditions: Conditions) -> list[str]:
    """Why an evaluation is not complete."""
    reasons = [incomplete] if incomplete else [f"{missing} samples are missing"] * bool(missing)
    if len(presets := sum((tally.presets for tally in conditions.values()), Counter[str]())) > 1:
        reasons.append(f"answers were made with several presets: {', '.join(sorted(presets))}")
    if unrewarded := sum(tally.unrewarded for tally in conditions.values()):
        reasons.append(f"{unrewarded} answers have no reward")
    return reasons


def _counts(conditions: Conditions, problems: int, epochs: int) -> dict[str, int]:
    samples = sum(tally.outcomes.total() for tally in conditions.values())
    return {
        "problems": problems,
        "conditions": len(conditions),
        "samples": samples,
        "failed": sum(tally.outcomes["failed"] for tally in conditions.values()),
        "missing": problems * epochs * len(conditions) - samples,
    }


def _paired(conditions: Conditions, config: Config) -> list[dict[str, Any]]:
    """In its mode each variant against the control, and steered against not; in its variant tools against none."""
    plain = [(mode, variant) for mode, variant in conditions if variant in config.variants]
    pairs = [((mode, CONTROL), (mode, variant), "variant") for mode, variant in plain if variant != CONTROL]
    pairs += [(("no-tools", variant), (mode, variant), "mode") for mode, variant in plain if mode == "with-tools"]
    pairs += [((mode, c.variant), (mode, c.name), "steering") for mode in config.modes for c in cells(config)]
    compared = [
        {"a": ".".join(a), "b": ".".join(b), "kind": kind}
        | paired_difference(conditions[a].correct, conditions[b].correct)
        for a, b, kind in pairs
        if a in conditions
    ]
    corrected = holm([pair["p"] for pair in compared])
    return [pair | {"p_holm": p} for pair, p in zip(compared, corrected, strict=True)]


def _sweep(conditions: Conditions, paired: list[dict[str, Any]], config: Config) -> list[dict[str, Any]]:
    """Of each mode and steered variant, the accuracy by layer (rows) and scale (columns).

    Scale 0 is the variant itself where it changes nothing.
    """
    if not config.sweep:
        return []
    differences = {pair["b"]: pair for pair in paired if pair["kind"] == "steering"}
    scales: list[float | None] = [None]
    if "scale" in config.sweep:
        scales = [*sorted({*config.sweep["scale"], *([0.0] if config.plain_at_zero else [])})]
    tables = []
    for mode, variant in product(config.modes, config.variants):
        names = {(cell.layer, cell.scale): cell.name for cell in cells(config) if cell.variant == variant}
        rows = []
        for layer in layers(config):
            of = [names.get((layer, scale), variant) for scale in scales]
            accuracies = [conditions[mode, name].summary()[config.rule]["accuracy"] for name in of]
            pairs = [differences.get(f"{mode}.{name}", {}) for name in of]
            cell = [
                {"accuracy": accuracy, "difference": pair.get("difference"), "p_holm": pair.get("p_holm")}
                for accuracy, pair in zip(accuracies, pairs, strict=True)
            ]
            rows.append({"layer": layer, "cells": cell})
        tables.append({"mode": mode, "variant": variant, "scales": scales, "rows": rows})
    return tables


def _lacking(directory: Path, session_id: str) -> int:
    """How many of the runs that were stored for the samples are not among those that were transferred."""
    transferred = transferred_runs(directory, session_id)
    turns = (turn.activations for sample in read_samples(directory) for turn in sample.turns)
    metas = (meta for meta in turns if meta and why_not_stored(meta) is None)
    return sum(run["run_id"] not in transferred for meta in metas for run in runs_of(meta))


def _transferred(directory: Path) -> dict[str, Any] | None:
    path = directory / FOLDER / TRANSFER_FILE
    return read_json(path) if path.exists() else None


def _times(modes: list[ModeTally]) -> dict[str, Any]:
    """Of the first request and the last answer; `seconds` leaves out pauses in which nothing was asked."""
    started = list(chain.from_iterable(mode.started for mode in modes))
    ended = list(chain.from_iterable(mode.ended for mode in modes))
    return {
        "started": _moment(min(started)) if started else None,
        "ended": _moment(max(ended)) if ended else None,
        "seconds": covered(started, ended),
    }


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
