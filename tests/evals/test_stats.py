import pytest
from hypothesis import given
from hypothesis import strategies as st

from evals.stats import covered, mcnemar, paired_difference, proportion, quantiles


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


@pytest.mark.parametrize(
    ("only_a", "only_b", "p"),
    [(0, 0, 1.0), (1, 1, 1.0), (0, 1, 1.0), (0, 5, 0.0625), (5, 0, 0.0625), (2, 10, 158 / 4096), (3, 3, 1.0)],
)
def test_p_is_mcnemars_exact(only_a: int, only_b: int, p: float) -> None:
    assert mcnemar(only_a, only_b) == pytest.approx(p, rel=1e-12)


@given(st.integers(0, 3000), st.integers(0, 3000))
def test_p_is_the_same_from_both_sides_and_falls_with_the_difference(a: int, b: int) -> None:
    assert 0.0 <= mcnemar(a, b) == mcnemar(b, a) <= 1.0
    if a > b:
        assert mcnemar(a + 1, b) <= mcnemar(a, b)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 10)), max_size=20))
def test_seconds_without_a_request_do_not_count(intervals: list[tuple[int, int]]) -> None:
    busy = {second for start, length in intervals for second in range(start, start + length)}
    assert covered([a for a, _ in intervals], [a + length for a, length in intervals]) == len(busy)
