"""Fits with more training rows than features: all fits share the rows and standardize their weights instead.

A problem is a fit and a column. Newton's method for all problems together, its linear systems by conjugate gradients
(Nocedal and Wright, Numerical Optimization, 2006, chapter 7.1), preconditioned by the products of all rows' features,
which changes how fast they converge and not to what. Shapes: `p` problems.
"""

from __future__ import annotations

import numpy as np
import torch

_STEPS = 60
_CG_STEPS = 250
_HALVINGS = 30
_CHUNK = 8192  # rows


class _Problems:
    """The rows as some problems see them; `fits` `[p]` says whose training rows each problem has."""

    def __init__(self, rows: torch.Tensor, mask: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> None:
        self.rows, self.fast = rows, rows.float()  # directions need less precision than gradients
        self.mask = mask.T.to(rows.dtype)  # [n, fits]
        self.mean, self.std = mean.T.to(rows.dtype), std.T.to(rows.dtype)  # [hidden, fits]
        gram = torch.zeros(rows.shape[1], rows.shape[1], dtype=torch.float64)
        for first in range(0, len(rows), _CHUNK):
            part = self.fast[first : first + _CHUNK]
            gram += part.T @ part
        values, vectors = torch.linalg.eigh(gram / len(rows))
        self._values, self._vectors = values.clamp(min=0).float().unsqueeze(1), vectors.float()

    def scores(self, weights: torch.Tensor, fits: torch.Tensor, fast: bool = False) -> torch.Tensor:
        """Standardized rows times weights `[hidden, p]`: `[n, p]`."""
        scaled = weights / self.std[:, fits].to(weights.dtype)
        offset = (self.mean[:, fits].to(weights.dtype) * scaled).sum(0)
        return ((self.fast if fast else self.rows) @ scaled).sub_(offset)

    def back(self, values: torch.Tensor, fits: torch.Tensor, fast: bool = False) -> torch.Tensor:
        """The transpose: of `[n, p]`, `[hidden, p]`."""
        raw = (self.fast if fast else self.rows).T @ values
        found: torch.Tensor = (raw - self.mean[:, fits].to(raw.dtype) * values.sum(0)) / self.std[:, fits].to(raw.dtype)
        return found

    def precondition(self, values: torch.Tensor, curvature: torch.Tensor, penalty: torch.Tensor) -> torch.Tensor:
        """About the inverse of the system's matrix, whose rows weigh `curvature` `[p]` in sum, times `[hidden, p]`."""
        found: torch.Tensor = self._vectors @ ((self._vectors.T @ values) / (self._values * curvature + penalty))
        return found


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
    problems = _Problems(rows, mask, mean, std)
    count, k = len(mask), labels.shape[1]
    fits, column = (part.reshape(-1) for part in torch.meshgrid(torch.arange(count), torch.arange(k), indexing="ij"))
    y = labels.to(rows.dtype)
    found, bias = _SOLVERS[method](problems, fits, column, y, penalty.reshape(-1).to(rows.dtype))
    logits = problems.scores(found, fits).add_(bias)
    directions = found.view(-1, count, k).permute(1, 0, 2) if weights else found.new_empty(count, 0, k)
    return logits.view(-1, count, k).permute(1, 0, 2).numpy(), directions.numpy(), bias.view(count, k).numpy()


def _difference(
    problems: _Problems, fits: torch.Tensor, column: torch.Tensor, y: torch.Tensor, _: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    mask, of = problems.mask[:, fits], y[:, column]
    positive, negative = mask * of, mask * (1 - of)
    positive, negative = positive / positive.sum(0).clamp(min=1), negative / negative.sum(0).clamp(min=1)
    weights = problems.back(positive - negative, fits)
    return weights, -(problems.scores(weights, fits) * (positive + negative)).sum(0) / 2


def _ridge(
    problems: _Problems, fits: torch.Tensor, column: torch.Tensor, y: torch.Tensor, penalty: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Least squares by the solver's steps on what is left of them, each of which takes two digits or more."""
    mask = problems.mask[:, fits]
    weights, bias = y.new_zeros(len(problems.mean), len(fits)), y.new_zeros(len(fits))
    for _ in range(8):
        residual = mask * (problems.scores(weights, fits) + bias - (2 * y[:, column] - 1))
        slope, slope_bias = problems.back(residual, fits) + penalty * weights, residual.sum(0)
        step, step_bias = _direction(problems, fits, mask, penalty, slope, slope_bias)
        weights, bias = weights - step, bias - step_bias
        if (step.abs().amax(0) <= 1e-7 * weights.abs().amax(0)).all():
            break
    return weights, bias


def _logistic(
    problems: _Problems, fits: torch.Tensor, column: torch.Tensor, y: torch.Tensor, penalty: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    weights, bias = y.new_zeros(len(problems.mean), len(fits)), y.new_zeros(len(fits))
    tolerance = 1e-9 if y.dtype == torch.float64 else 1e-6  # of the decrement before a step
    active = torch.arange(len(fits))
    for _ in range(_STEPS):
        of, mask = fits[active], problems.mask[:, fits[active]]
        logits = problems.scores(weights[:, active], of).add_(bias[active])
        chance = logits.sigmoid()
        residual = mask * (chance - y[:, column[active]])
        slope = problems.back(residual, of) + penalty[active] * weights[:, active]
        slope_bias = residual.sum(0)
        curvature = mask * chance * (1 - chance)
        del chance, residual
        step, step_bias = _direction(problems, of, curvature, penalty[active], slope, slope_bias)
        decrement = (slope * step).sum(0) + slope_bias * step_bias
        moved = problems.scores(step, of).add_(step_bias)
        size = _step_size(
            mask, y[:, column[active]], penalty[active], weights[:, active], step, logits, moved, decrement
        )
        weights[:, active] -= size * step
        bias[active] -= size * step_bias
        active = active[decrement > tolerance]
        if not len(active):
            break
    return weights, bias


def _step_size(
    mask: torch.Tensor,
    y: torch.Tensor,
    penalty: torch.Tensor,
    weights: torch.Tensor,
    step: torch.Tensor,
    logits: torch.Tensor,
    moved: torch.Tensor,
    decrement: torch.Tensor,
) -> torch.Tensor:
    """The first of 1, 1/2, 1/4, ... that lowers the loss enough (Armijo), `[p]`."""

    def loss(size: torch.Tensor) -> torch.Tensor:
        at = logits - size * moved
        data = mask * (torch.nn.functional.softplus(at) - y * at)
        return data.sum(0, dtype=torch.float64) + penalty * (weights - size * step).square().sum(0) / 2

    size = torch.ones_like(decrement)
    start = loss(torch.zeros_like(decrement))
    rounding = 8 * torch.finfo(logits.dtype).eps * start
    for _ in range(_HALVINGS):
        worse = loss(size) > start - 1e-4 * size * decrement + rounding
        if not worse.any():
            break
        size[worse] /= 2
    return size


def _direction(
    problems: _Problems,
    fits: torch.Tensor,
    curvature: torch.Tensor,
    penalty: torch.Tensor,
    slope: torch.Tensor,
    slope_bias: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Solve (rows' curvature rows + penalty) x = slope to two digits, with the intercept: `[hidden, p]`, `[p]`."""
    dtype, curvature, penalty = slope.dtype, curvature.float(), penalty.float()
    # near an optimum slopes may be too small for float32
    scale = torch.maximum(slope.abs().amax(0), slope_bias.abs()).clamp(min=torch.finfo(dtype).tiny)
    left, left_bias = (slope / scale).float(), (slope_bias / scale).float()
    total = curvature.sum(0).clamp(min=torch.finfo(torch.float32).tiny)
    found, found_bias = torch.zeros_like(left), torch.zeros_like(left_bias)
    way, way_bias = problems.precondition(left, total, penalty), left_bias / total
    power = (left * way).sum(0) + left_bias * way_bias
    enough = 1e-4 * power
    for _ in range(_CG_STEPS):
        weighted = problems.scores(way, fits, fast=True).add_(way_bias).mul_(curvature)
        image, image_bias = problems.back(weighted, fits, fast=True) + penalty * way, weighted.sum(0)
        along = (way * image).sum(0) + way_bias * image_bias
        size = torch.where((power > enough) & (along > 0), power / along, 0.0)
        found, found_bias = found + size * way, found_bias + size * way_bias
        left, left_bias = left - size * image, left_bias - size * image_bias
        toward, toward_bias = problems.precondition(left, total, penalty), left_bias / total
        next_power = (left * toward).sum(0) + left_bias * toward_bias
        if not ((next_power > enough) & (size > 0)).any():
            break
        turn = torch.where(power > enough, next_power / power, 0.0)
        way, way_bias, power = toward + turn * way, toward_bias + turn * way_bias, next_power
    return found.to(dtype) * scale, found_bias.to(dtype) * scale


_SOLVERS = {"difference": _difference, "ridge": _ridge, "logistic": _logistic}
