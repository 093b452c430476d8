"""The examples of a session with their classes and groups, as the options ask for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from deployments.options import home
from evals.config import EvalError
from evals.probes import labels
from evals.probes.examples import Examples, find
from evals.probes.options import Options


class Data(NamedTuple):
    """Examples with their classes and groups.

    Attributes:
        examples: The examples, `n` of them.
        label: The label of the positive class.
        positive: Each example's class, bool `[n]`.
        groups: Each example's group by number, `[n]`.
    """

    examples: Examples
    label: str
    positive: np.ndarray
    groups: np.ndarray

    @property
    def group_count(self) -> int:
        """How many groups there are."""
        return len(np.unique(self.groups))


def load(given: Options) -> Data:
    """The examples that are probed.

    Raises:
        EvalError: The stored runs or their labels do not allow it.
        OSError: The disk refuses.
    """
    return _load(given, given.session or "", given.positive, given.points)


def load_test(given: Options, session: str, data: Data) -> Data:
    """The examples of a test session at all points and choices of tokens; as for `load`.

    Args:
        given: The options.
        session: The session.
        data: The examples that the probe is fitted to.

    Raises:
        EvalError: As for `load`, or the session is of another model.
        OSError: The disk refuses.
    """
    test = _load(given, session, data.label, data.examples.points)
    if (model := test.examples.model) != data.examples.model:
        raise EvalError(f"--test-session {session}: its runs are of {model}, the probe is of {data.examples.model}")
    return test


def _load(given: Options, session: str, positive: str | None, points: Sequence[str]) -> Data:
    choices = given.choices
    spans = [choice.label for choice in choices if choice.kind == "span"]
    group, store = given.group_column, given.store
    if given.results is not None:
        session, folder, source = labels.from_results(given.results, given.label, group, spans)
        store = store or folder
    elif given.labels is not None:
        source = labels.from_file(given.labels, given.label, group, spans)
    else:
        source = labels.from_tags(given.label, group)
    store = store or home() / "activations"
    found = find(store, session, source, points, choices, group is not None, given.skip_missing)
    label, classes = labels.classes([run.label for run in found.runs], positive)
    _, groups = np.unique([run.group for run in found.runs], return_inverse=True)
    return Data(found, label, classes, groups)
