"""The examples of a session with their classes and groups, as the options ask for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from deployments.options import home
from evals.config import EvalError
from evals.probes import labels
from evals.probes.examples import Examples, find
from evals.probes.sweep_options import Options


class Data(NamedTuple):
    """Examples with their classes and groups."""

    examples: Examples  # the examples, `n` of them
    label: str  # the label of the positive class
    positive: np.ndarray  # each example's class, bool `[n]`
    groups: np.ndarray  # each example's group by number, `[n]`
    unused: set[str]  # names of rows of labels that have no stored run in the session

    @property
    def group_count(self) -> int:
        """How many groups there are."""
        return len(np.unique(self.groups))

    @property
    def names(self) -> np.ndarray:
        """The examples' run ids, `[n]`."""
        return np.array([run.run_id for run in self.examples.runs])


def load(given: Options) -> tuple[Data, list[Data]]:
    """The examples that are probed, and those of each test session at the same points.

    Raises:
        EvalError: The stored runs or their labels do not allow it.
        OSError: The disk refuses.
    """
    data = _load(given, given.session or "", given.positive, given.points)
    tests = [_load_test(given, session, data) for session in given.test_sessions]
    if unused := data.unused.intersection(*(test.unused for test in tests)):
        data.examples.left_out["are rows of labels without a stored run"] = len(unused)
    return data, tests


def _load_test(given: Options, session: str, data: Data) -> Data:
    test = _load(given, session, data.label, data.examples.points)
    if (model := _model(test)) != (own := _model(data)):
        raise EvalError(f"--test-session {session}: its runs are of the model {model}, the probe is of {own}")
    known = {run.label for run in data.examples.runs}
    if given.positive is None and (other := Counter(run.label for run in test.examples.runs if run.label not in known)):
        listed = ", ".join(f"{value!r} ({count})" for value, count in other.most_common(labels.NAMED))
        raise EvalError(
            f"--test-session {session}: it has labels that {data.examples.session} does not have, {listed}: "
            "choose one label with --positive; all others are then the negative class"
        )
    return test


def _model(data: Data) -> str:
    return data.examples.model + (f" ({data.examples.revision})" if data.examples.revision else "")


def _load(given: Options, session: str, positive: str | None, points: Sequence[str]) -> Data:
    choices = given.choices
    spans = [choice.label for choice in choices if choice.kind == "span"]
    group, store = given.group_column, given.store
    if given.evaluated:
        session, store, source = labels.from_evaluation(
            given.results, given.inspect, given.label, group, spans, given.store
        )
    elif given.labels is not None:
        source = labels.from_file(given.labels, given.label, group, spans)
    else:
        source = labels.from_tags(given.label, group)
    store = store or home() / "activations"
    found = find(store, session, source, points, choices, group is not None, given.skip_missing)
    label, classes = labels.classes([run.label for run in found.runs], positive)
    _, groups = np.unique([run.group for run in found.runs], return_inverse=True)
    return Data(found, label, classes, groups, source.unused)
