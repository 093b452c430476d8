"""Labels of the runs that a log of inspect_ai names: its scores, with the sample as the group."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from evals.activations_meta import runs_of, why_not_stored
from evals.config import EvalError
from evals.labels.table import SPAN, Turns, stored, tabled

COLUMNS = {
    **dict.fromkeys(("run_id", "session_id", "sample_id", "problem", "task"), pa.string()),
    **{"epoch": pa.int32(), "turn": pa.int32(), "last_turn": pa.bool_(), "uri": pa.string()},
    **{"span.prompt_last": SPAN, "span.end": SPAN},
}
LEFT_OUT = ("failed samples", "samples without a stored run", "runs of earlier turns", "calls of other models")


def labelled(path: str | Path, *, turns: Turns = "last") -> pa.Table:
    """A row for each recorded run of a log of inspect_ai, written over the model provider `vitrine`.

    Columns are those of `COLUMNS`, with the sample's id as `problem`, and one for each score: by its scorer's name, or
    `<scorer>.<key>` of a score with several values. `C` and `I` are true and false where there is no other grade.

    Args:
        path: the log, `.eval` or `.json`.
        turns: "last", each sample's last call of the evaluated model, or "all".

    Returns:
        The table. Its schema's metadata has under `labels`, as JSON, the names of the labels and what was left out.

    Raises:
        EvalError: inspect_ai is not installed, the log cannot be read, or it names no stored run.
    """
    left = Counter(dict.fromkeys(LEFT_OUT, 0))
    rows = [row for sample in _samples(Path(path)) for row in _rows(sample, turns, left)]
    if not rows:
        raise EvalError(f"{path} has no stored runs: run the task with --model vitrine/... and -M capture=...")
    return tabled(rows, COLUMNS, left)


def _samples(path: Path) -> Iterator[dict[str, Any]]:
    """The samples of a log, each as JSON with the name of its task and its model."""
    try:
        from inspect_ai.log import read_eval_log, read_eval_log_samples
    except ImportError:
        raise EvalError(
            "--inspect reads logs with inspect_ai: in Vitrine's clone, pip install -c constraints.txt -e '.[inspect]'"
        ) from None
    try:
        spec = read_eval_log(str(path), header_only=True).eval
        for sample in read_eval_log_samples(str(path), all_samples_required=False):
            yield sample.model_dump(mode="json", include={"id", "epoch", "scores", "events", "error"}) | {
                "task": spec.task,
                "model": spec.model,
            }
    except (OSError, ValueError, LookupError) as error:
        raise EvalError(f"{path} cannot be read: {error}") from error


def _rows(sample: dict[str, Any], turns: Turns, left: Counter[str]) -> Iterator[dict[str, Any]]:
    if sample["error"] or not sample["scores"]:
        left["failed samples"] += 1
        return
    events = [event for event in sample["events"] if event["event"] == "model" and event.get("output")]
    own = [event for event in events if event["model"] == sample["model"] and not event.get("role")]
    left["calls of other models"] += len(events) - len(own)
    metas = [(event["output"].get("metadata") or {}).get("activations_meta") for event in own]
    last = len(own) - 1
    left["samples without a stored run"] += not own or why_not_stored(metas[last]) is not None
    for turn, meta in enumerate(metas):
        if meta is None or why_not_stored(meta) is not None:
            continue
        if turn < last and turns == "last":
            left["runs of earlier turns"] += len(runs_of(meta))
            continue
        for run in runs_of(meta):
            yield stored(str(meta.get("session_id")), run) | {
                "sample_id": str(sample["id"]),
                "problem": str(sample["id"]),
                "task": sample["task"],
                "epoch": sample["epoch"],
                "turn": turn,
                "last_turn": turn == last,
                **_scores(sample["scores"]),
            }


def _scores(scores: dict[str, dict[str, Any]]) -> dict[str, Any]:
    if taken := COLUMNS.keys() & scores:
        raise EvalError(f"--inspect: a scorer has the name {min(taken)}, which is a column of the labels: rename it")
    labels: dict[str, Any] = {}
    for name, score in scores.items():
        value = score["value"]
        labels |= {f"{name}.{key}": part for key, part in value.items()} if isinstance(value, dict) else {name: value}
    return labels
