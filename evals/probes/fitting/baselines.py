"""Baselines: how well the text alone and its length alone predict the labels, in the same folds as the probes."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_union

from evals.auroc import by_folds
from evals.probes.fitting.fitting import FitJob, select
from evals.probes.fitting.solver import solve
from evals.probes.inputs.examples import Example, RowPlace
from evals.probes.inputs.features import standardized

_C = (1.0, 100.0)
_TERMS = 50_000  # most words, and most pieces of words, that are features


class Baseline(NamedTuple):
    """Held-out scores `[n]` and their AUROC; None with the reason where there is no text."""

    held_out: np.ndarray | None
    auroc: float | None
    reason: str | None = None


def text(job: FitJob, runs: Sequence[Example], tokens: str) -> Baseline:
    """Logistic regression on TF-IDF of words, pairs of words and pieces of words, C by the inner folds.

    Args:
        job: The folds.
        runs: The examples.
        tokens: A choice of tokens; the text ends with the last of them.
    """
    if missing := sum(run.text is None for run in runs):
        return Baseline(None, None, f"{missing} of {len(runs)} runs were stored without their text")
    texts = np.array([_read(run, run.at[tokens]) for run in runs], dtype=object)
    if any(not any(map(str.strip, texts[training])) for training in job.folds.mask.numpy()):
        return Baseline(None, None, "the text before the tokens is empty or white space")
    logits = np.empty((len(job.folds.mask), len(runs), len(_C)), dtype=np.float32)
    for fit, training in enumerate(job.folds.mask.numpy()):
        vectorizer = make_union(
            TfidfVectorizer(ngram_range=(1, 2), max_features=_TERMS, dtype=np.float32, token_pattern=r"\w+|[^\w\s]+"),
            TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 4), max_features=_TERMS, dtype=np.float32),
        )
        rows = vectorizer.fit_transform(texts[training])
        held_out = vectorizer.transform(texts[~training])
        for column, c in enumerate(_C):
            model = LogisticRegression(C=c, max_iter=300)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ConvergenceWarning)
                model.fit(rows, job.positive[training])
            logits[fit, ~training, column] = model.decision_function(held_out)
    return _selected(job, logits)


def _read(run: Example, place: RowPlace) -> str:
    """The text up to the last token that a probe reads; in place of that token its id, where its text is not known."""
    return (run.text or "")[: place.characters] + (f" {place.token_id}" if place.cut else "")


def length(job: FitJob, runs: Sequence[Example], tokens: str) -> Baseline:
    """Logistic regression on the logarithms of how many tokens and characters there are; arguments as for `text`."""
    places = [run.at[tokens] for run in runs]
    counts = np.log1p(np.array([[place.tokens, place.characters] for place in places], dtype=np.float32))
    labels = torch.from_numpy(job.positive[:, None])
    rows = standardized(counts)[0]
    return _selected(job, solve("logistic", rows, job.folds.mask, labels, torch.tensor([[1.0]])).logits)


def _selected(job: FitJob, logits: np.ndarray) -> Baseline:
    held_out = select(logits, job.positive, job.folds).held_out
    return Baseline(held_out, float(by_folds(held_out, job.positive, job.folds.of)))
