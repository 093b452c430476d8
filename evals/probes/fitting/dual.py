"""Fits with no more training rows than features: solved for one coefficient a training row, from the rows' products.

A solution's weights are the training rows times its coefficients (the representer theorem). Logistic regression is
Newton's method as in Rasmussen and Williams, Gaussian Processes for Machine Learning (2006), algorithm 3.1, with an
intercept. Shapes: `m` training rows, `k` columns.
"""

from __future__ import annotations

import numpy as np
import torch

_STEPS = 60
_HALVINGS = 30
_TOLERANCE = 1e-7  # of the decrement before a step, about twice the loss it gains; the step then squares what is left


def solve(
    method: str,
    rows: torch.Tensor,
    mask: torch.Tensor,
    mean: torch.Tensor,
    std: torch.Tensor,
    labels: torch.Tensor,
    penalty: torch.Tensor,
    weights: bool,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """As `solver.solve`: logits `[fits, n, k]`, weights `[fits, hidden or 0, k]`, bias `[fits, k]`."""
    k = labels.shape[1]
    logits = np.empty((len(mask), len(rows), k))
    directions = np.empty((len(mask), rows.shape[1] if weights else 0, k))
    biases = np.empty((len(mask), k))
    for fit, training in enumerate(mask):
        every = (rows.double() - mean[fit]) / std[fit]  # [n, hidden]
        products = every @ every[training].T  # [n, m]
        y = labels[training].double()
        coefficients, bias = _SOLVERS[method](products[training], y, penalty[fit])
        logits[fit] = products @ coefficients + bias
        biases[fit] = bias
        if weights:
            directions[fit] = every[training].T @ coefficients
    return logits, directions, biases


def _difference(products: torch.Tensor, y: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    positive, negative = y / y.sum(0).clamp(min=1), (1 - y) / (1 - y).sum(0).clamp(min=1)
    coefficients = positive - negative
    return coefficients, -((products @ coefficients) * (positive + negative)).sum(0) / 2


def _ridge(products: torch.Tensor, y: torch.Tensor, penalty: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    target = 2 * y - 1
    bias = target.mean(0)  # the rows' mean is 0
    coefficients = torch.empty_like(target)
    for value in set(penalty.tolist()):
        chosen = penalty == value
        factor = torch.linalg.cholesky(products + value * torch.eye(len(y), dtype=y.dtype))
        coefficients[:, chosen] = torch.cholesky_solve((target - bias)[:, chosen], factor)
    return coefficients, bias


def _logistic(products: torch.Tensor, y: torch.Tensor, penalty: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    coefficients, bias = torch.zeros_like(y), torch.zeros_like(penalty)
    active = torch.arange(y.shape[1])
    for _ in range(_STEPS):
        of = y[:, active], penalty[active], coefficients[:, active], bias[active]
        step, step_bias, decrement = _newton(products, *of)
        size = _step_size(products, *of, step, step_bias, decrement)
        coefficients[:, active] += size * step
        bias[active] += size * step_bias
        active = active[decrement > _TOLERANCE]
        if not len(active):
            break
    return coefficients, bias


def _newton(
    products: torch.Tensor, y: torch.Tensor, penalty: torch.Tensor, coefficients: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Newton's step for the coefficients `[m, k]` and the intercept `[k]`, and its decrement `[k]`."""
    scores = products @ coefficients  # [m, k], without the intercept
    chance = (scores + bias).sigmoid()
    curvature = (chance * (1 - chance)).T  # [k, m]
    root = curvature.sqrt()
    matrix = (root.unsqueeze(2) * products).mul_(root.unsqueeze(1))  # [k, m, m]
    matrix.diagonal(dim1=1, dim2=2).add_(penalty.unsqueeze(1))
    factor = torch.linalg.cholesky(matrix)
    # (products + penalty / curvature)^-1 of the working response, and of 1 for the intercept: [k, m, 2]
    right = torch.stack([curvature * (scores + bias).T + (y - chance).T, curvature], dim=2)
    image = (products @ right.transpose(0, 1).reshape(len(y), -1)).view(len(y), -1, 2).transpose(0, 1)
    inner = torch.cholesky_solve(root.unsqueeze(2) * image, factor)
    solved = (right - root.unsqueeze(2) * inner) / penalty.view(-1, 1, 1)
    total = solved.sum(1)  # [k, 2]; the coefficients of an optimum add up to 0
    new_bias = total[:, 0] / total[:, 1].clamp(min=torch.finfo(y.dtype).tiny)
    step = (solved[:, :, 0] - new_bias.unsqueeze(1) * solved[:, :, 1]).T - coefficients
    step_bias = new_bias - bias
    slope = ((chance - y) * (products @ step + step_bias)).sum(0) + penalty * (scores * step).sum(0)
    return step, step_bias, -slope


def _step_size(
    products: torch.Tensor,
    y: torch.Tensor,
    penalty: torch.Tensor,
    coefficients: torch.Tensor,
    bias: torch.Tensor,
    step: torch.Tensor,
    step_bias: torch.Tensor,
    decrement: torch.Tensor,
) -> torch.Tensor:
    """The first of 1, 1/2, 1/4, ... that lowers the loss enough (Armijo), `[k]`."""
    scores, moved = products @ coefficients, products @ step

    def loss(size: torch.Tensor) -> torch.Tensor:
        logits = scores + bias + size * (moved + step_bias)
        norm = ((coefficients + size * step) * (scores + size * moved)).sum(0)
        return (torch.nn.functional.softplus(logits) - y * logits).sum(0) + penalty * norm / 2

    size = torch.ones_like(penalty)
    start = loss(torch.zeros_like(penalty))
    for _ in range(_HALVINGS):
        worse = loss(size) > start - 1e-4 * size * decrement + 1e-13 * start
        if not worse.any():
            break
        size[worse] /= 2
    return size


_SOLVERS = {"difference": _difference, "ridge": _ridge, "logistic": _logistic}
