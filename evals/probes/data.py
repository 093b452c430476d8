"""The examples of a session with their classes and groups, as the options ask for them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from deployments.options import home
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
    return _load(given, given.session or "", given.positive)


def load_test(given: Options, session: str, point: str, tokens: str, positive: str) -> Data:
    """The examples of a test session at one point and choice of tokens; as for `load`.

    Args:
        given: The options.
        session: The session.
        point: The point.
        tokens: The choice of tokens.
        positive: The label of the positive class.
    """
    return _load(given, session, positive, [point], tokens)


def _load(
    given: Options, session: str, positive: str | None, points: list[str] | None = None, tokens: str | None = None
) -> Data:
    choices = [choice for choice in given.choices if tokens in (None, choice.name)]
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
    found = find(store, session, source, points or given.points, choices, group is not None, given.skip_missing)
    label, classes = labels.classes([run.label for run in found.runs], positive)
    _, groups = np.unique([run.group for run in found.runs], return_inverse=True)
    return Data(found, label, classes, groups)
