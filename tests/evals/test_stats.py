import pytest
from hypothesis import given
from hypothesis import strategies as st

from evals.stats import paired_difference, proportion, quantiles


def test_the_interval_is_wilsons() -> None:
    got = proportion(8, 10)
    assert (got["accuracy"], got["correct"], got["of"]) == (0.8, 8, 10)
    assert got["stderr"] == pytest.approx(0.12649, abs=1e-5)
    assert got["ci95"] == pytest.approx([0.49016, 0.94331], abs=1e-4)


@given(st.integers(0, 500), st.integers(0, 500))
def test_the_interval_holds_the_accuracy(hits: int, misses: int) -> None:
    got = proportion(hits, hits + misses)
    if got["of"]:
        low, high = got["ci95"]
        assert 0 <= low <= got["accuracy"] + 1e-12
        assert got["accuracy"] - 1e-12 <= high <= 1


def test_nothing_answered_has_no_accuracy() -> None:
    assert proportion(0, 0)["accuracy"] is None
    assert quantiles([]) == {"p50": None, "p95": None}
    assert paired_difference({}, {"a": True})["difference"] is None


def test_the_difference_is_paired_and_its_interval_repeats() -> None:
    a = {str(i): i < 50 for i in range(100)} | {"only in a": True}
    b = {str(i): i < 50 or i >= 80 for i in range(100)}
    got = paired_difference(a, b)
    assert (got["problems"], got["difference"], got["only_a"], got["only_b"]) == (100, 0.2, 0, 20)
    assert got["ci95"] == pytest.approx([0.12, 0.28], abs=0.015)
    assert got == paired_difference(a, b)


def test_modes_that_agree_differ_by_nothing() -> None:
    a = {"1": True, "2": False}
    assert paired_difference(a, a)["ci95"] == [0.0, 0.0]
