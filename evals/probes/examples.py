"""Which stored runs are examples, and which of their rows each choice of tokens means. No activation is read here."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from deployments.activations.facts import PointType, RunInfo
from deployments.activations.reader.row_index import RowIndex, index_rows
from deployments.activations.reader.sources import Wanted, by_schema, segments, select
from deployments.activations.reader.stored_rows import positions_of
from deployments.activations.segments.schema import file_info, point_types
from deployments.activations.segments.segments import RunBatches
from deployments.options import home
from deployments.points.names import recorded
from evals.config import EvalError
from evals.probes.labels import NAMED, RunLabels, Source, classes, from_evaluation, from_file, from_tags, label_text
from evals.probes.sweep_options import Options
from evals.probes.token_columns import TokenColumn


class Example(NamedTuple):
    """One run."""

    run_id: str  # the run
    sample_id: str | None  # its sample
    label: str  # its label
    group: str  # its group; its own id without groups
    text: str | None  # prompt and generated text; None where it was not stored
    prompt: str | None  # the hash of its messages; None where they are not known
    at: dict[str, RowPlace]  # by choice of tokens, which of the run's stored rows it means

    def read(self, tokens: str) -> str:
        """The text up to the last token that a probe reads, by its id where its text is not known.

        Without a text, what is equal for equal prompts.
        """
        place = self.at[tokens]
        if self.text is None:
            return f"{self.prompt or self.run_id} {place.tokens}"
        return self.text[: place.characters] + (f" {place.token_id}" if place.cut else "")


class RowPlace(NamedTuple):
    """A run's stored rows `[first, end)`, and the text and tokens up to the last of them."""

    first: int  # the first row
    end: int  # the row after the last
    characters: int  # characters of the run's text up to the end of the last row's token
    tokens: int  # tokens up to and with that one
    token_id: int  # that token
    cut: bool  # whether `characters` are without that token's, since where it ends was not stored


@dataclass(frozen=True, eq=False)
class Examples:
    """All examples of a session in one order, `n` of them."""

    session: str
    model: str
    revision: str | None  # the model's, where one was asked for
    points: list[str]  # by site and layer
    runs: list[Example]  # `[n]`
    ranges: dict[str, np.ndarray]  # by choice of tokens, each example's rows of `index`, `[n, 2]`
    index: RowIndex  # where the rows lie
    left_out: dict[str, int]  # how many runs were left out, by reason
    unused: set[str]  # names of rows of labels that have no stored run in the session
    label: str  # the label of the positive class
    positive: np.ndarray  # each example's class, bool `[n]`

    @cached_property
    def groups(self) -> np.ndarray:
        """Each example's group by number, `[n]`; groups in which a probe reads the same text are one."""
        same = [[run.group for run in self.runs], *([run.read(name) for run in self.runs] for name in self.ranges)]
        columns = [np.unique(column, return_inverse=True)[1] for column in same]
        groups, before = columns[0], None
        while before is None or (groups != before).any():
            before = groups
            for column in columns:
                least = np.full(len(column), len(groups))
                np.minimum.at(least, column, groups)
                groups = least[column]
        return np.unique(groups, return_inverse=True)[1]

    @property
    def group_count(self) -> int:
        """How many groups there are."""
        return len(np.unique(self.groups))

    @property
    def names(self) -> np.ndarray:
        """The examples' run ids, `[n]`."""
        return np.array([run.run_id for run in self.runs])


def load(given: Options) -> tuple[Examples, list[Examples]]:
    """The examples that are probed, and those of each test session at the same points.

    Raises:
        EvalError: The stored runs or their labels do not allow it.
        OSError: The disk refuses.
    """
    data = _load(given, given.session or "", label_text(given.positive), given.points)
    tests = [_load_test(given, session, data) for session in given.test_sessions]
    if unused := data.unused.intersection(*(test.unused for test in tests)):
        data.left_out["are rows of labels without a stored run"] = len(unused)
    return data, tests


def _load_test(given: Options, session: str, data: Examples) -> Examples:
    test = _load(given, session, data.label, data.points)
    if (model := _model(test)) != (own := _model(data)):
        raise EvalError(f"--test-session {session}: its runs are of the model {model}, the probe is of {own}")
    known = {run.label for run in data.runs}
    if given.positive is None and (other := Counter(run.label for run in test.runs if run.label not in known)):
        listed = ", ".join(f"{value!r} ({count})" for value, count in other.most_common(NAMED))
        raise EvalError(
            f"--test-session {session}: it has labels that {data.session} does not have, {listed}: "
            "choose one label with --positive; all others are then the negative class"
        )
    return test


def _model(data: Examples) -> str:
    return data.model + (f" ({data.revision})" if data.revision else "")


def _load(given: Options, session: str, positive: str | None, points: Sequence[str]) -> Examples:
    choices = given.choices
    spans = [choice.label for choice in choices if choice.kind == "span"]
    group, store = given.group_column, given.store
    if given.evaluated:
        session, store, source = from_evaluation(given.results, given.inspect, given.label, group, spans, given.store)
    elif given.labels is not None:
        source = from_file(given.labels, given.label, group, spans)
    else:
        source = from_tags(given.label, group)
    store = store or home() / "activations"
    return find(store, session, source, points, choices, group is not None, given.skip_missing, positive)


def find(
    store: Path,
    session: str,
    source: Source,
    points: Sequence[str],
    tokens: Sequence[TokenColumn],
    grouped: bool,
    skip_missing: bool = False,
    positive: str | None = None,
) -> Examples:
    """Look through a session once.

    Args:
        store: The store's directory.
        session: The session.
        source: Labels, groups and spans.
        points: Names or wildcards; `*` is one part of a name.
        tokens: Choices of tokens.
        grouped: Whether each example needs a group.
        skip_missing: Leave out runs that lack a label, a group, a point or the tokens' rows; else they are refused.
        positive: The label of the positive class; None where the labels tell it.

    Raises:
        EvalError: There are no such runs, they lack something, are of several models or dtypes, or not of two classes.
        OSError: The disk refuses.
    """
    try:
        files = segments(store, session)
    except (FileNotFoundError, ValueError) as error:
        raise EvalError(f"--session {session}: {error}") from error
    (model, revision), names = _points(files, session, points)
    by_request, lacking = dict[str, Example](), defaultdict[str, list[str]](list)
    repeated = list[tuple[Example, Example]]()
    for chosen in select(files, Wanted(session)):
        if (row := source.of(chosen.facts)) is None:
            continue
        example = _example(chosen, row, names, tokens, grouped)
        if isinstance(example, str):
            lacking[example].append(chosen.facts.run_id)
        elif (first := by_request.setdefault(_request(chosen.facts, source.tags), example)) is not example:
            repeated.append((first, example))
    _check_labels(session, repeated)
    runs = list(by_request.values())
    if not runs and not lacking:
        raise EvalError(f"--session {session}: none of its runs has a label")
    if lacking and not (skip_missing and runs):
        advice = "; use --skip-missing to skip such runs"
        if not runs:  # an advice to leave out all helps nobody
            tags = sorted({name for chosen in select(files, Wanted(session)) for name in chosen.facts.tags})
            advice = f"; the session's tags are {', '.join(tags) or 'none'}"
        raise EvalError(f"--session {session}: {_lacks(lacking, len(runs))}{advice}")
    index = index_rows(store, names, session=session, runs=[run.run_id for run in runs])
    left_out = {reason: len(ids) for reason, ids in lacking.items()}
    left_out |= {"repeat the prompt and sample of another run": len(repeated)} if repeated else {}
    label, is_positive = classes([run.label for run in runs], positive)
    ranges = _ranges(index, runs, tokens)
    return Examples(session, model, revision, names, runs, ranges, index, left_out, source.unused, label, is_positive)


def _request(facts: RunInfo, labels: Collection[str]) -> str:
    """What runs have in common that repeat one another; `labels` are tags that may differ."""
    text = facts.text
    if text is None:
        text = facts.messages_hash if facts.tokens == facts.prompt_tokens else facts.run_id
    tags = sorted(item for item in facts.tags.items() if item[0] not in labels)
    return json.dumps([facts.sample_id, text or facts.run_id, tags, facts.interventions])


def _check_labels(session: str, repeated: Sequence[tuple[Example, Example]]) -> None:
    """Refuse runs that repeat another one with another label."""
    if unequal := [pair for pair in repeated if pair[0].label != pair[1].label]:
        listed = "; ".join(" and ".join(f"{run.run_id} {run.label!r}" for run in pair) for pair in unequal[:NAMED])
        raise EvalError(
            f"--session {session}: {len(unequal)} runs repeat the prompt and sample of another run with another "
            f"label ({listed}): delete the wrong ones, or name samples by sample_id"
        )


def _lacks(lacking: Mapping[str, Sequence[str]], others: int) -> str:
    reasons = ", ".join(f"{len(ids)} {reason} (as {ids[0]})" for reason, ids in lacking.items())
    return f"of {others + sum(map(len, lacking.values()))} runs {reasons}"


def _points(files: Sequence[Path], session: str, patterns: Sequence[str]) -> tuple[tuple[str, str | None], list[str]]:
    """The one model of files and its revision, and the names of the points that are meant."""
    schemas = by_schema(files)
    models, kinds = Counter[tuple[str, str | None]](), dict[str, Counter[PointType]]()
    for schema, of in schemas:
        facts = file_info(schema)
        count = sum(1 for _ in select(of, Wanted(session))) if len(schemas) > 1 else 1
        models[facts.model, facts.revision] += count
        for name, kind in point_types(schema).items():
            kinds.setdefault(name, Counter())[kind] += count
    if len(models) > 1:
        listed = ", ".join(
            f"{count} of {model}" + (f" ({revision})" if revision else "")
            for (model, revision), count in models.most_common()
        )
        raise EvalError(
            f"--session {session}: its runs are of several models, {listed}: collect each in a session of its own",
        )
    layers = max((file_info(schema).layers or 0 for schema, _ in schemas), default=0) or None
    try:
        names = recorded(patterns, sorted(kinds, key=by_site), layers)
    except ValueError as error:
        raise EvalError(f"--points {error}") from error
    for name in names:
        if len(kinds[name]) > 1:
            listed = ", ".join(f"{count} of {kind.dtype} {kind.shape}" for kind, count in kinds[name].most_common())
            raise EvalError(f"--session {session}: {name} has several dtypes or shapes, {listed}")
        if len(shape := next(iter(kinds[name])).shape) > 1:
            raise EvalError(f"--points {name}: its rows have the shape {shape}, and probes need vectors")
    return next(iter(models), ("", None)), sorted(names, key=by_site)


def by_site(name: str) -> tuple[str, int, str]:
    """A key that sorts points by site, and those of a site by layer."""
    match = re.search(r"\.(\d+)\.", name)
    return (name[: match.start()] + name[match.end() :], int(match[1]), name) if match else ("", -1, name)


def _example(
    chosen: RunBatches, row: RunLabels, points: Sequence[str], tokens: Sequence[TokenColumn], grouped: bool
) -> Example | str:
    """A run as an example, or what it lacks."""
    facts = chosen.facts
    if row.label is None:
        return "have no label"
    if grouped and row.group is None:
        return "have no group"
    if any(point not in chosen.types for point in points):
        return "did not record all points"
    places = dict[str, RowPlace]()
    positions, ids = (_column(chosen, name) for name in ("position", "token_id"))
    offsets = _column(chosen, "text_offset") if "text_offset" in chosen.batches[0].schema.names else None
    for choice in tokens:
        rows = _rows(choice, chosen, row, positions)
        if rows is None:
            return f"have no stored rows for --tokens {choice.name}"
        last = rows[1] - 1
        characters, cut = _characters(facts, positions, offsets, rows[1])
        places[choice.name] = RowPlace(*rows, characters, int(positions[last]) + 1, int(ids[last]), cut)
    return Example(
        facts.run_id,
        facts.sample_id,
        row.label,
        row.group if grouped and row.group is not None else facts.run_id,
        facts.text,
        facts.messages_hash,
        places,
    )


def _rows(choice: TokenColumn, run: RunBatches, row: RunLabels, positions: np.ndarray) -> tuple[int, int] | None:
    """The stored rows of a choice of tokens, `[first, end)`; None unless all of them are there."""
    if choice.kind == "mean":
        return 0, len(positions)
    if choice.role is not None:
        try:
            at = np.searchsorted(positions, positions_of(run, choice.role, "tokens"))
        except ValueError as error:
            raise EvalError(f"--tokens {choice.name}: {error}") from error
        if len(at) and at[-1] + 1 - at[0] != len(at):
            raise EvalError(
                f"--tokens {choice.name}: run {run.facts.run_id} has such tokens in several places: choose a turn"
            )
        return (int(at[0]), int(at[-1]) + 1) if len(at) else None
    wanted = choice.positions(run.facts, row.spans)
    if wanted is None:
        return None
    first, end = np.searchsorted(positions, wanted).tolist()
    return (first, end) if end - first == wanted[1] - wanted[0] > 0 else None


def _column(chosen: RunBatches, name: str) -> np.ndarray:
    parts = [batch[name].to_numpy(zero_copy_only=False) for batch in chosen.batches]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _characters(facts: RunInfo, positions: np.ndarray, offsets: np.ndarray | None, end: int) -> tuple[int, bool]:
    """Characters of the text up to the end of the token of row `end - 1`, and whether they are without that token's.

    A token ends where the next begins. Where the next one's row is not stored, the text ends before the token, since
    all that follows is unknown to a probe of this row.
    """
    text, last = len(facts.text or ""), end - 1
    if offsets is None or positions[last] + 1 == facts.tokens:
        return text, False
    cut = end == len(positions) or positions[end] != positions[last] + 1
    offset = offsets[last if cut else end]
    return (text, False) if np.isnan(offset) else (int(offset), cut)


def _ranges(index: RowIndex, runs: Sequence[Example], tokens: Sequence[TokenColumn]) -> dict[str, np.ndarray]:
    """By choice of tokens, the rows of the index that each example means, `[n, 2]`."""
    blocks, of = np.unique(index.run, return_index=True)
    first = {index.runs[run].run_id: int(index.starts[block]) for run, block in zip(blocks, of, strict=True)}
    begins = np.array([first[run.run_id] for run in runs])
    return {choice.name: begins[:, None] + np.array([run.at[choice.name][:2] for run in runs]) for choice in tokens}
