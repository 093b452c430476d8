"""Outlier features: the same features, far from zero in many layers and at many tokens.

Dettmers, Lewis, Belkada and Zettlemoyer (2022), "LLM.int8(): 8-bit Matrix Multiplication for Transformers at Scale",
section 4.1.
"""

from typing import NamedTuple

import numpy as np

from evals.outliers.counts import Counts
from evals.outliers.stored import Stored


class Rule(NamedTuple):
    """When a feature is an outlier.

    Attributes:
        magnitude: A value counts from this magnitude on.
        layers: The least share of recorded layers with such a value; one value makes a layer count.
        positions: The least share of token positions with such a value, whatever the layer.
    """

    magnitude: float = 6.0
    layers: float = 0.25
    positions: float = 0.06


def count(stored: Stored, magnitude: float) -> Counts:
    """Count values from a magnitude on, in one pass.

    Args:
        stored: What attention and the MLP read.
        magnitude: The least that counts.
    """
    counts = Counts(stored)
    for batch in stored.batches(0, len(stored.index)):
        counts.add(batch, np.full(batch.tops.shape, magnitude))
    return counts


def outliers(counts: Counts, rule: Rule) -> np.ndarray:
    """The features that the rule names, ascending, int64; whatever its shares, each has a value that counts."""
    layers = (counts.largest_by_layer() > 0).sum(axis=0) / len(counts.layers)
    is_often = (counts.positions > 0) & (counts.positions / counts.rows >= rule.positions)
    return np.flatnonzero((layers >= rule.layers) & is_often)
