"""The solver's fits are scikit-learn's, for many training sets, penalties and labelings at once."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given, reject
from hypothesis import strategies as st
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression, RidgeClassifier
from sklearn.preprocessing import StandardScaler

from evals.probes.fitting.solver import Method, solve
from evals.probes.inputs.features import standardized


def made(n: int, hidden: int, seed: int) -> np.ndarray:
    """Rows as layers have them: a few directions are large, one feature is constant, one far from 0."""
    random = np.random.default_rng(seed)
    rows = random.normal(size=(n, hidden)) * np.logspace(1, -2, hidden) @ random.normal(size=(hidden, hidden))
    rows[:, 0] = 3.0
    rows[:, 1] += 500
    return rows.astype(np.float32)


def reference(method: Method, rows: np.ndarray, training: np.ndarray, labels: np.ndarray, c: float) -> np.ndarray:
    """Scores of all rows by scikit-learn; of the difference of means, by its definition."""
    scaler = StandardScaler().fit(rows[training])
    of, y = scaler.transform(rows), labels[training]
    if method == "difference":
        yes, no = of[training][y].mean(axis=0), of[training][~y].mean(axis=0)
        return np.asarray((of - (yes + no) / 2) @ (yes - no))
    if method == "ridge":
        return np.asarray(RidgeClassifier(alpha=1 / c).fit(of[training], y).decision_function(of))
    model = LogisticRegression(C=c, tol=1e-8, max_iter=100_000, solver="newton-cholesky")
    try:
        return np.asarray(model.fit(of[training], y).decision_function(of))
    except ConvergenceWarning:  # its line search finds no step that helps, within rounding
        reject()


@given(
    method=st.sampled_from(["difference", "logistic", "ridge"]),
    n=st.integers(12, 70),
    hidden=st.integers(2, 60),
    seed=st.integers(0, 1000),
)
def test_held_out_logits_are_those_of_scikit_learn(method: Method, n: int, hidden: int, seed: int) -> None:
    rows = made(n, hidden, seed).astype(np.float64)
    random = np.random.default_rng(seed)
    c, mask = [1e-5, 1e-2, 1.0, 10.0], random.permutation(n) % 5 != np.arange(5)[:, None]
    labels = np.zeros(n, dtype=bool)
    labels[random.permutation(n)[: n // 2]] = True
    assume(all(0 < labels[training].sum() < training.sum() for training in mask))
    several = np.repeat(labels[:, None], len(c), axis=1)
    found = solve(
        method,
        standardized(rows.copy())[0].double(),
        torch.from_numpy(mask),
        torch.from_numpy(several),
        1 / torch.tensor([c], dtype=torch.float64),
    )
    for fit, training in enumerate(mask):
        for column, value in enumerate(c):
            expected = reference(method, rows, training, labels, value)
            np.testing.assert_allclose(found.logits[fit, :, column], expected, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("n", [40, 400])
@pytest.mark.parametrize("method", ["difference", "logistic", "ridge"])
def test_weights_on_standardized_rows_give_the_logits(method: Method, n: int) -> None:
    rows = standardized(made(n, 60, 0))[0].double()
    mask = torch.arange(n)[None] % 5 != torch.arange(3)[:, None]
    labels = torch.arange(n)[:, None] % 2 == 0
    found = solve(method, rows, mask, labels, torch.tensor([[1.0]]), weights=True)
    assert found.weights is not None
    again = np.einsum(
        "fnh,fh->fn", (rows.numpy()[None] - found.mean[:, None]) / found.std[:, None], found.weights[..., 0]
    )
    np.testing.assert_allclose(again + found.bias, found.logits[..., 0], atol=1e-6, rtol=1e-6)
    assert (found.std[:, 0] == 1).all()  # the constant feature


def test_single_precision_is_enough_for_many_rows() -> None:
    rows = standardized(made(3000, 40, 1))[0]
    labels = (rows[:, 5:6] + torch.randn(3000, 1, generator=torch.Generator().manual_seed(0))) > 0
    mask, penalty = torch.arange(3000)[None] % 5 != torch.arange(2)[:, None], torch.tensor([[0.1]])
    single, double = (solve("logistic", part, mask, labels, penalty).logits for part in (rows, rows.double()))
    np.testing.assert_allclose(single, double, atol=1e-3)
