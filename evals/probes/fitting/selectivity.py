"""Selectivity of probes of ungrouped examples: accuracy less that at a control task.

Hewitt and Liang, Designing and Interpreting Probes with Control Tasks (2019): each type of token has a random label,
which a probe can only know by memorizing the types.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from evals.probes.fitting.fitting import FitJob
from evals.probes.fitting.headline import Headline
from evals.probes.inputs.data import Data
from evals.probes.sweep_options import Options

TYPES = 20  # of last tokens; of fewer there are too few labelings


class Task(NamedTuple):
    """Labelings of a control task, bool `[p, n]`; None with the reason where there is none."""

    labels: np.ndarray | None
    reason: str | None = None


def control_task(given: Options, data: Data) -> Task:
    """Random labels by the type of each example's last token, as often positive as the examples are."""
    if given.group_column is not None:
        return Task(None, "selectivity is for --ungrouped examples")
    if not given.permutations:
        return Task(None, "no permutations")
    tokens = given.choices[0].name
    types, of = np.unique([run.at[tokens].token_id for run in data.examples.runs], return_inverse=True)
    if len(types) < TYPES:
        return Task(None, f"the examples end in {len(types)} types of tokens; a control task needs {TYPES}")
    random = np.random.default_rng(given.seed)
    return Task((random.random((given.permutations, len(types))) < data.positive.mean())[:, of])


def selectivity(job: FitJob, headline: Headline, task: Task, reasons: dict[str, str]) -> dict[str, Any]:
    """The headline's `accuracy`, `control_accuracy` (median) and `selectivity`, null with the reason where it is.

    Args:
        job: The job.
        headline: With scores of the control task.
        task: The control task.
        reasons: The headline's; the reason is put there.
    """
    if task.labels is None or headline.control is None:
        reasons["selectivity"] = task.reason or ""
        return {"selectivity": None, "control_accuracy": None}
    own = float(np.mean((headline.held_out.probabilities > 0.5) == job.positive))
    control = float(np.median(np.mean((headline.control.probabilities > 0.5) == task.labels, axis=1)))
    return {"selectivity": own - control, "control_accuracy": control}
