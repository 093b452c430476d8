"""The probe of all examples, tried on another session's."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.metrics import balanced_accuracy_score

from evals.auroc import auroc, interval, resampled
from evals.probes.fitting.fitting import Rows, probability
from evals.probes.fitting.folds import permuted
from evals.probes.fitting.headline import Headline, quantiles
from evals.probes.inputs.data import Data
from evals.probes.sweep_options import Options


def transferred(given: Options, data: Data, headline: Headline, test: Data) -> dict[str, Any]:
    """Figures of one test session, for JSON.

    The null is that of the session's labels permuted, scored by the same probe.

    Args:
        given: The options.
        data: The examples that the probe was fitted to.
        headline: With that probe.
        test: The test session's examples.

    Raises:
        EvalError: Rows are not finite.
        OSError: The disk refuses.
    """
    final = headline.final
    rows = Rows(test.examples.index, final.point, final.tokens, test.examples.ranges[final.tokens])
    scores, positive = rows.scores(headline.probe), test.positive
    area = float(auroc(scores, positive)[0])
    samples = resampled(
        scores[None], positive, np.zeros(len(positive), dtype=int), test.groups, given.resamples, given.seed
    )
    between = interval(area, samples[0], test.group_count)
    labelings = permuted(positive, test.groups, test.names, given.permutations, given.seed)
    null = auroc(np.broadcast_to(scores, labelings.shape), labelings)[0]
    return {
        "session": test.examples.session,
        "auroc": area,
        "auroc_low": between.low,
        "auroc_high": between.high,
        "control": quantiles(null.tolist()),
        "balanced_accuracy": float(balanced_accuracy_score(positive, probability(scores, headline.calibration) > 0.5)),
        "n": len(positive),
        "groups": test.group_count,
        "shared_groups": len({run.group for run in test.examples.runs} & {run.group for run in data.examples.runs}),
        "left_out": test.examples.left_out,
        "reasons": between.reasons("auroc"),
    }
