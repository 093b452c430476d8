"""Difference of means, ridge and logistic regression: many training sets, penalties and labelings of the same rows.

With no more training rows than features the solver works on the rows' products (`dual`), else on the features
(`primal`). Both minimize what scikit-learn's Ridge and LogisticRegression do, to the same optimum.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import numpy as np
import torch

from evals.probes.fitting import dual, primal

Method = Literal["difference", "logistic", "ridge"]
METHODS: tuple[Method, ...] = get_args(Method)
_ELEMENTS = 1 << 24  # of the largest array of a solver, which has about ten of them
_CHUNK = 8192  # rows


class Fits(NamedTuple):
    """Fits, each on its own training rows, of each column.

    Attributes:
        logits: Scores of all rows, also of those that a fit was not trained on, `[fits, n, k]`.
        weights: On the standardized row, `[fits, hidden, k]`; None unless asked for.
        bias: `[fits, k]`.
        mean: Of each fit's training rows, `[fits, hidden]`.
        std: Their standard deviation, 1 where a feature is constant, `[fits, hidden]`.
    """

    logits: np.ndarray
    weights: np.ndarray | None
    bias: np.ndarray
    mean: np.ndarray
    std: np.ndarray


def solve(
    method: Method,
    rows: torch.Tensor,
    mask: torch.Tensor,
    labels: torch.Tensor,
    penalty: torch.Tensor,
    weights: bool = False,
) -> Fits:
    """Fit every column on the rows of every fit, standardized by the mean and deviation of its training rows.

    Args:
        method: `difference` is the difference of the classes' means, and 0 halfway; `ridge` is least squares of -1
            and 1.
        rows: `[n, hidden]`, float32 or float64, of about mean 0 and standard deviation 1.
        mask: Which rows each fit is trained on, bool `[fits, n]`.
        labels: 0 or 1, `[n, k]`.
        penalty: 1 / C in scikit-learn's terms: half of it multiplies the squared norm of the weights; the intercept is
            free. Broadcast to `[fits, k]`; `difference` has none.
        weights: Whether to give the weights.
    """
    mean, std = moments(rows, mask)
    penalty = penalty.double().expand(len(mask), labels.shape[1])
    few = int(mask.sum(1).max()) <= rows.shape[1]
    solver = dual.solve if few else primal.solve
    size = mask.sum(1).max().item() ** 2 if few else len(mask) * len(rows)
    step = max(1, int(_ELEMENTS // size))
    parts = [
        solver(method, rows, mask, mean, std, labels[:, i : i + step], penalty[:, i : i + step], weights)
        for i in range(0, labels.shape[1], step)
    ]
    logits, directions, bias = (np.concatenate(part, axis=-1) for part in zip(*parts, strict=True))
    return Fits(logits, directions if weights else None, bias, mean.numpy(), std.numpy())


def moments(rows: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard deviation of each fit's training rows, float64 `[fits, hidden]`; 1 for a constant feature."""
    total = torch.zeros(len(mask), rows.shape[1], dtype=torch.float64)
    squares = total.clone()
    for first in range(0, len(rows), _CHUNK):
        part, weight = rows[first : first + _CHUNK].double(), mask[:, first : first + _CHUNK].double()
        total += weight @ part
        squares += weight @ part.square()
    mean = total / mask.sum(1, keepdim=True)
    variance = squares / mask.sum(1, keepdim=True) - mean.square()
    constant = variance <= 1e-12 * (1 + mean.square())
    return mean, torch.where(constant, 1.0, variance).sqrt()
