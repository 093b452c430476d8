"""Baselines: how well the text alone and its length alone predict the labels, in the same folds as the probes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import PredefinedSplit, cross_val_predict
from sklearn.pipeline import make_pipeline, make_union
from sklearn.preprocessing import StandardScaler

from evals.probes.examples import Example
from evals.probes.fits import FitJob, nested, select

_C = (1.0, 100.0)
_TERMS = 50_000  # most words, and most pieces of words, that are features


class Baseline(NamedTuple):
    """Held-out scores `[n]`; None with the reason where there is no text."""

    held_out: np.ndarray | None
    reason: str | None = None


def text(job: FitJob, runs: Sequence[Example], tokens: str) -> Baseline:
    """Logistic regression on TF-IDF of words, pairs of words and pieces of words, C by the inner folds.

    Args:
        job: The folds.
        runs: The examples.
        tokens: A choice of tokens; the text ends with the last of them.
    """
    if missing := sum(run.text is None for run in runs):
        return Baseline(None, f"{missing} of {len(runs)} runs were stored without their text")
    texts = np.array([run.read(tokens) for run in runs], dtype=object)
    if not any(map(str.strip, texts)):
        return Baseline(None, "the text before the tokens is empty or white space")

    def fit(training: np.ndarray) -> np.ndarray:
        vectorizer = make_union(
            TfidfVectorizer(ngram_range=(1, 2), max_features=_TERMS, dtype=np.float32, token_pattern=r"\w+|[^\w\s]+"),
            TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 4), max_features=_TERMS, dtype=np.float32),
        ).fit(texts[training])
        rows = vectorizer.transform(texts)
        models = [LogisticRegression(C=c, max_iter=1000).fit(rows[training], job.positive[training]) for c in _C]
        return np.stack([model.decision_function(rows) for model in models], axis=1)

    return Baseline(select(nested(job.folds, fit), job.positive, job.folds).held_out)


def length(job: FitJob, runs: Sequence[Example], tokens: str) -> Baseline:
    """Logistic regression on the logarithms of how many tokens and characters there are; arguments as for `text`."""
    counts = np.log1p([[run.at[tokens].tokens, run.at[tokens].characters] for run in runs])
    model, folds = make_pipeline(StandardScaler(), LogisticRegression()), PredefinedSplit(job.folds)
    return Baseline(cross_val_predict(model, counts, job.positive, cv=folds, method="decision_function"))
