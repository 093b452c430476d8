"""The probe of all examples, tried on another session's."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.metrics import balanced_accuracy_score

from evals.auroc import area, interval
from evals.probes.data import Data
from evals.probes.features import features
from evals.probes.fits import aurocs, probability
from evals.probes.folds import permuted
from evals.probes.headline import Headline, control
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
    final, positive = headline.final, test.positive
    scores = headline.probe.scores(features(test.examples.index, final.point, test.examples.ranges[final.tokens]))
    own = area(scores, positive, test.groups)
    between = interval(own)
    labelings = permuted(positive, test.groups, test.names, given.permutations, given.seed).T
    return {
        "session": test.examples.session,
        "auroc": own.value,
        "auroc_low": between.low,
        "auroc_high": between.high,
        **control(aurocs(np.broadcast_to(scores[:, None], labelings.shape), labelings)),
        "balanced_accuracy": float(balanced_accuracy_score(positive, probability(scores, headline.calibration) > 0.5)),
        "n": len(positive),
        "groups": test.group_count,
        "shared_groups": len({run.group for run in test.examples.runs} & {run.group for run in data.examples.runs}),
        "left_out": test.examples.left_out,
        "reasons": {"auroc_low": between.reason} if between.reason else {},
    }
