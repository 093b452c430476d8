"""A table of the runs that an evaluation recorded, with what probes are trained on.

samples/*.json -> runs that count, their scores and rewards
stored files   -> which of their tokens are the answer, the tool calls and the tool results
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pyarrow as pa

from evals.activations_meta import points_of, runs_of, tokens_of, why_not_stored
from evals.config import EvalError
from evals.labels.spans import spans_of
from evals.results.results import read_config, read_samples
from evals.results.transfer import files_of
from evals.scoring import RULES, Rule
from evals.task.trajectory import Sample

SPAN = pa.list_(pa.int32(), 2)
COLUMNS = {
    **dict.fromkeys(("run_id", "session_id", "sample_id", "problem", "mode", "variant"), pa.string()),
    **{"epoch": pa.int32(), "turn": pa.int32(), "last_turn": pa.bool_(), "uri": pa.string()},
    **{f"span.{name}": SPAN for name in ("prompt_last", "answer", "tool_calls", "tool_results", "end")},
}
LEFT_OUT = ("failed samples", "answers without a stored run", "runs of earlier turns")
GRADES = {"C": True, "I": False}
Turns = Literal["last", "all"]


class _Labelled(NamedTuple):
    """A run that counts: its row, the sample it is of, and the turn's number."""

    row: dict[str, Any]
    sample: Sample
    turn: int


def labelled(results_dir: str | Path, *, turns: Turns = "last") -> pa.Table:
    """A row for each recorded run of an evaluation that counts, in the order of the samples' names.

    Runs of samples that failed, and runs that no sample names since theirs was asked again, are left out. The last run
    of a conversation with tools has all turns before it in its prompt: it alone is there, unless `turns` is "all".

    Columns are `run_id`, `session_id`, `sample_id` and `problem` (one group), `mode`, `variant`, `epoch`, `turn`,
    `last_turn`, `uri` (of the run's file when it was stored), `span.<part>` (the part's first token and the one after
    its last, as positions in prompt + generated, or null), `outcome`, `correct`, `correct_<rule>`, `reward.<name>` and
    `reward`.

    Args:
        results_dir: the results directory; it need not be finished.
        turns: "last" or "all".

    Returns:
        The table. Its schema's metadata has under `labels`, as JSON, the names of the labels, what was left out, the
        rule, and why spans are null.

    Raises:
        EvalError: the directory has no evaluation, one that recorded nothing, or one that is being scored again.
    """
    directory = Path(results_dir)
    config = read_config(directory)
    if not config.collect_activations:
        raise EvalError(f"{directory} recorded no activations: run the evaluation with --collect-activations")
    left = dict.fromkeys(LEFT_OUT, 0)
    entries = list(_labelled(directory, turns, left))
    why_no_spans = _read_spans(directory, entries, config.rule)
    return tabled([entry.row for entry in entries], COLUMNS, left, rule=config.rule, why_no_spans=why_no_spans)


def tabled(
    rows: list[dict[str, Any]], columns: Mapping[str, pa.DataType], left: Mapping[str, int], **facts: str | None
) -> pa.Table:
    """Rows as a table, with what they have beside some columns as labels, each of one type.

    `C` and `I`, inspect_ai's grades, are true and false in a column without other texts, and texts that are all numbers
    are numbers.

    Args:
        rows: by column.
        columns: their types.
        left: how many of what was left out.
        facts: further ones for the metadata.
    """
    labels = list(dict.fromkeys(name for row in rows for name in row if name not in columns))
    arrays = {name: pa.array([row.get(name) for row in rows], kind) for name, kind in columns.items()}
    for name in labels:
        arrays[name] = _label([row.get(name) for row in rows])
    table = pa.table(arrays)
    return table.replace_schema_metadata({"labels": json.dumps({"labels": labels, "left_out": left} | facts)})


def as_number(text: str) -> int | float | None:
    """The number that a text is in JSON, a whole one as int; None if it is none."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value or abs(value) == math.inf:
        return None
    return int(value) if value == int(value) else value


def _is_exact(number: float | None) -> bool:
    """Whether float64 holds a number exactly, so not that of a long id."""
    return number is not None and abs(number) <= 2**53


def _label(values: list[Any]) -> pa.Array:
    numbers = [as_number(value) if isinstance(value, str) else value for value in values]
    if all(not isinstance(value, str) or _is_exact(number) for value, number in zip(values, numbers, strict=True)):
        values = numbers
    if {value for value in values if isinstance(value, str)} <= GRADES.keys():
        values = [GRADES.get(value, value) if isinstance(value, str) else value for value in values]
    kinds = {type(value) for value in values if value is not None}
    if kinds == {bool}:
        return pa.array(values, pa.bool_())
    if kinds <= {int, float}:
        return pa.array(values, pa.float64())
    return pa.array((value if isinstance(value, str | None) else json.dumps(value) for value in values), pa.string())


def _labelled(directory: Path, turns: Turns, left: dict[str, int]) -> Iterator[_Labelled]:
    """The runs that count, without what is read from stored files; counts the others in `left`."""
    for sample in read_samples(directory):
        if sample.outcome == "failed":
            left["failed samples"] += 1
            continue
        if sample.correct is None:
            raise EvalError(
                f"{directory} is being scored again: wait; if the scoring was interrupted, run evals.gsm8k --resume",
            )
        last = len(sample.turns) - 1
        stored = [number for number, turn in enumerate(sample.turns) if why_not_stored(turn.activations) is None]
        left["answers without a stored run"] += last not in stored
        for number in stored:
            meta = sample.turns[number].activations or {}
            if number < last and turns == "last":
                left["runs of earlier turns"] += len(runs_of(meta))
                continue
            for run in runs_of(meta):
                yield _Labelled(_row(sample, number, str(meta.get("session_id")), run), sample, number)


def _row(sample: Sample, turn: int, session_id: str, run: dict[str, Any]) -> dict[str, Any]:
    names = {"mode", "variant", "epoch", "outcome", "correct", "reward", *(f"correct_{rule}" for rule in RULES)}
    row = stored(session_id, run, sample.turns[turn].prompt_tokens) | sample.model_dump(include=names)
    row |= {"sample_id": sample.id, "problem": sample.id, "turn": turn, "last_turn": turn == len(sample.turns) - 1}
    return row | {f"reward.{name}": value for name, value in sample.rewards.items()}


def stored(session_id: str, run: dict[str, Any], prompt_tokens: int = 0) -> dict[str, Any]:
    """The columns of a row that an answer says of its run: ids, one of its files, and spans that need no text.

    Args:
        session_id: the run's.
        run: an entry of `activations_meta.runs`.
        prompt_tokens: of the run, where the entry does not say it.
    """
    tokens, prompt = tokens_of(run), run.get("prompt_tokens") or prompt_tokens
    uris = [uri for at in points_of(run).values() if isinstance(uri := at.get("uri"), str)]
    return {
        "run_id": run["run_id"],
        "session_id": session_id,
        "uri": next(iter(uris), None),
        "span.prompt_last": (prompt - 1, prompt) if prompt else None,
        "span.end": (tokens - 1, tokens) if tokens else None,
    }


def _read_spans(directory: Path, entries: Sequence[_Labelled], rule: Rule) -> str | None:
    """Writes into the rows the spans that stored files say; gives the reason where some are not known."""
    first = next((entry.row for entry in entries if entry.row["uri"]), None)
    if first is None:
        return "no answer says where its activations are stored"
    try:
        folder = files_of(directory, first["session_id"], first["uri"])
        from deployments.activations.reader.sources import segments
        from deployments.activations.segments.segments import whole_runs  # here: torch comes with it

        places = {run.facts.run_id: (file, run.offset) for file in segments(folder) for run in whole_runs(file)}
    except (OSError, ValueError) as error:
        return str(error)
    without_text = 0
    for row, sample, turn in entries:
        if row["run_id"] not in places:
            continue
        run = next(whole_runs(*places[row["run_id"]]))
        without_text += run.facts.text is None
        row |= {f"span.{name}": span for name, span in spans_of(run, sample, turn, rule).items()}
    lacking = sum(entry.row["run_id"] not in places for entry in entries)
    reasons = [f"{lacking} runs are not in {folder}"] * bool(lacking)
    reasons += [f"{without_text} runs were stored without their text"] * bool(without_text)
    return "; ".join(reasons) or None
