import math
from fractions import Fraction
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evals.stats import (
    Z95,
    clustered,
    covered,
    holm,
    paired_difference,
    pass_at,
    proportion,
    quantiles,
    sign_flip,
)


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
    assert paired_difference({}, {"a": [True]})["difference"] is None


def paired(both: int, only_a: int, only_b: int, neither: int) -> dict[str, Any]:
    pairs = [(True, True)] * both + [(True, False)] * only_a + [(False, True)] * only_b + [(False, False)] * neither
    return paired_difference(*({str(i): [pair[side]] for i, pair in enumerate(pairs)} for side in (0, 1)))


def test_the_difference_is_over_the_problems_that_both_have() -> None:
    a = {str(i): [i < 50] for i in range(100)} | {"only in a": [True]}
    b = {str(i): [i < 50 or i >= 80] for i in range(100)}
    got = paired_difference(a, b)
    assert (got["problems"], got["difference"], got["only_a"], got["only_b"]) == (100, 0.2, 0, 20)


def test_the_interval_of_the_difference_is_tangos() -> None:
    # Of the table of Cavo et al. (2012), as the tests of R's contingencytables have it.
    assert paired(59, 16, 6, 80)["ci95"] == pytest.approx([-0.1240, -0.0054], abs=5e-5)


@pytest.mark.parametrize("n", [1, 2, 60, 1319])
def test_where_no_problem_differs_the_interval_still_has_a_width_that_falls_with_the_problems(n: int) -> None:
    got = paired(n // 2, 0, 0, n - n // 2)
    assert (got["difference"], got["p"]) == (0.0, 1.0)
    assert got["ci95"] == pytest.approx([-(Z95**2) / (n + Z95**2), Z95**2 / (n + Z95**2)])


TABLES = st.tuples(*[st.integers(0, 60)] * 4).filter(any)


@given(TABLES)
def test_the_interval_holds_the_difference_and_turns_with_the_sides(table: tuple[int, int, int, int]) -> None:
    both, only_a, only_b, neither = table
    got, turned = paired(*table), paired(both, only_b, only_a, neither)
    low, high = got["ci95"]
    assert -1 <= low <= got["difference"] <= high <= 1
    assert low < high
    assert turned["ci95"] == [-high, -low]


@given(TABLES)
def test_zero_lies_outside_the_interval_where_mcnemars_score_says_so(table: tuple[int, int, int, int]) -> None:
    _, only_a, only_b, _ = table
    low, high = paired(*table)["ci95"]
    z = (only_b - only_a) / math.sqrt(only_a + only_b) if only_a + only_b else 0.0
    assert (low > 0, high < 0) == (z > Z95, z < -Z95)


@pytest.mark.parametrize(
    ("only_a", "only_b", "p"),
    [(0, 0, 1.0), (1, 1, 1.0), (0, 1, 1.0), (0, 5, 0.0625), (5, 0, 0.0625), (2, 10, 158 / 4096), (3, 3, 1.0)],
)
def test_p_is_mcnemars_exact(only_a: int, only_b: int, p: float) -> None:
    assert flipped(only_a, only_b) == pytest.approx(p, rel=1e-12)


def flipped(only_a: int, only_b: int) -> float:
    return sign_flip([Fraction(-1)] * only_a + [Fraction(1)] * only_b)


@given(st.integers(0, 700), st.integers(0, 700))
def test_p_is_the_same_from_both_sides_and_falls_with_the_difference(a: int, b: int) -> None:
    assert 0.0 <= flipped(a, b) == flipped(b, a) <= 1.0
    if a > b:
        assert flipped(a + 1, b) <= flipped(a, b)


@given(st.lists(st.sampled_from([Fraction(k, 6) for k in range(-6, 7)]), min_size=1, max_size=10))
def test_p_of_several_answers_is_the_share_of_all_signs(differences: list[Fraction]) -> None:
    sums = [abs(sum(signed)) for signed in product(*((one, -one) for one in differences))]
    assert sign_flip(differences) == pytest.approx(sum(one >= abs(sum(differences)) for one in sums) / len(sums))


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 10)), max_size=20))
def test_seconds_without_a_request_do_not_count(intervals: list[tuple[int, int]]) -> None:
    busy = {second for start, length in intervals for second in range(start, start + length)}
    assert covered([a for a, _ in intervals], [a + length for a, length in intervals]) == len(busy)


def test_answers_that_repeat_their_problem_count_as_one_problem() -> None:
    hits = [1, 0, 1, 1, 0, 1]
    alone, repeated = clustered(hits, [1] * 6), clustered([4 * hit for hit in hits], [4] * 6)
    assert alone == proportion(4, 6)
    assert (repeated["correct"], repeated["of"], repeated["accuracy"]) == (16, 24, alone["accuracy"])
    assert repeated["stderr"] == pytest.approx(alone["stderr"] * math.sqrt(6 / 5))
    assert repeated["ci95"][1] - repeated["ci95"][0] > 0.9 * (alone["ci95"][1] - alone["ci95"][0])


def test_several_answers_to_one_problem_are_not_independent() -> None:
    assert clustered([7], [8]) | {"stderr": None, "ci95": None} == clustered([7], [8])
    got = paired_difference({"1": [True] * 8}, {"1": [False] * 8})
    assert (got["difference"], got["ci95"], got["p"]) == (-1.0, None, 1.0)


def test_no_interval_is_narrower_than_that_of_as_many_independent_answers() -> None:
    # Each problem has one of two answers right: shares differ less by problem than those of independent answers.
    assert clustered([1] * 39 + [2], [2] * 40)["ci95"] == pytest.approx(proportion(41, 80)["ci95"])
    a, b = {str(i): [False, False] for i in range(40)}, {str(i): [True, i == 0] for i in range(40)}
    assert paired_difference(a, b)["ci95"] == pytest.approx(paired(0, 0, 41, 39)["ci95"], abs=1e-9)


@pytest.mark.parametrize("answers", [1, 2])
def test_the_largest_difference_is_sure_and_none_is_not(answers: int) -> None:
    right, wrong = ({str(i): [value] * answers for i in range(50)} for value in (True, False))
    broken, same = paired_difference(right, wrong), paired_difference(right, right)
    assert broken["p"] == pytest.approx(2**-49)
    assert broken["ci95"] == paired(0, 50, 0, 0)["ci95"]
    assert broken["ci95"][1] > -0.95
    assert (same["difference"], same["p"]) == (0.0, 1.0)
    assert same["ci95"] == pytest.approx([-(Z95**2) / (50 + Z95**2), Z95**2 / (50 + Z95**2)])


def test_few_problems_prove_little() -> None:
    a, b = {str(i): [False, False] for i in range(5)}, {str(i): [True, i < 2] for i in range(5)}
    assert paired_difference(a, b)["p"] == 2 / 2**5


@given(st.lists(st.tuples(*[st.integers(0, 4)] * 2), min_size=2, max_size=30))
def test_the_interval_of_several_answers_holds_their_difference(hits: list[tuple[int, int]]) -> None:
    a, b = ({str(i): [n < pair[side] for n in range(4)] for i, pair in enumerate(hits)} for side in (0, 1))
    got = paired_difference(a, b)
    assert -1 <= got["ci95"][0] <= got["difference"] <= got["ci95"][1] <= 1
    assert got["ci95"][0] < got["ci95"][1]


def test_a_difference_of_several_answers_is_of_the_problems_means() -> None:
    a = {"1": [True, False], "2": [False, False], "3": [True, True]}
    b = {"1": [True, True], "2": [True, False], "3": [True, True]}
    got = paired_difference(a, b)
    assert (got["difference"], got["only_a"], got["only_b"], got["p"]) == (pytest.approx(1 / 3), 0, 2, 0.5)


def test_pass_at_k_is_chens_estimate() -> None:
    assert pass_at(1, [1, 0], [4, 4]) == pytest.approx(1 / 8)
    assert pass_at(2, [1, 4], [4, 4]) == pytest.approx((1 - 3 / 6 + 1) / 2)
    assert pass_at(8, [1], [4]) is None


def test_holms_correction() -> None:
    assert holm([0.01, None, 0.04, 0.03, 0.005]) == [pytest.approx(0.03), None, 0.06, 0.06, pytest.approx(0.02)]
