import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.demo_model.calculator import MAX_LENGTH, CalculatorError, answer_call, calculate


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("14*23", "322"),
        ("2 + 3 * (4 - 1)", "11"),
        ("10/4", "2.5"),
        ("10/5", "2"),
        ("0.1 + 0.2", "0.3"),
        ("-3 - -5", "2"),
        ("1/3", "0.3333333333"),
        ("-1/8", "-0.125"),
        ("-1/(3*10000000000)", "0"),
        ("1,200 * 2", "2400"),
        (".5*10", "5"),
        ("2**10", "1024"),
        ("-2**2", "-4"),
        ("2**3**2", "512"),
        ("2**-2", "0.25"),
        ("1.05**3", "1.157625"),
        ("0**0", "1"),
        ("(2/3)**2", "0.4444444444"),
        ("(-1)**" + "9" * 150, "-1"),
        ("10**299", "1" + "0" * 299),
        ("2**-40", "0.0000000000009094947017729282379150390625"),
        ("99999999999999999999 * 99999999999999999999", "9999999999999999999800000000000000000001"),
        ("0.12345678901234567890123 * 10", "1.2345678901234567890123"),
    ],
)
def test_values_are_exact_and_plain(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "1/0",
        "2**0.5",
        "2**(1/3)",
        "0**-1",
        "9**9**9",
        "(1/9)**999",
        "10**300",
        "7//2",
        "1e9",
        "abs(1)",
        "__import__('os')",
        "1 +",
        "",
        "()",
        "1 2",
        "2(3)",
        "1j",
        "0x10",
        "...",
    ]
    + ["-" * (MAX_LENGTH + 1) + "1", "(" * 500, "+".join(["1"] * MAX_LENGTH)],
)
def test_what_it_cannot_do_is_an_error(expression: str) -> None:
    with pytest.raises(CalculatorError):
        calculate(expression)


def test_the_longest_nesting_is_worked_out() -> None:
    assert calculate("-" * (MAX_LENGTH - 1) + "1") == "-1"
    assert calculate("(" * 90 + "1" + ")" * 90) == "1"


@given(st.text(alphabet="0123456789.+-*/() ,", max_size=60))
def test_any_expression_has_a_value_or_a_reason(expression: str) -> None:
    assert answer_call("calculator", f'{{"expression": "{expression}"}}')


@given(st.lists(st.integers(1, 10**6), min_size=2, max_size=25))
def test_towers_and_products_of_powers_end_at_once(numbers: list[int]) -> None:
    for sign in ("**", "**-", "**9*", "**99/"):
        expression = sign.join(map(str, numbers))
        result = answer_call("calculator", f'{{"expression": "{expression}"}}')
        assert result.startswith("error: ") or len(result) < 2 * 1100


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("calculator", '{"expression": "2*3"}', "6"),
        ("calculator", '{"expression": "1/0"}', "error: division by zero"),
        ("calculator", "{", "error: the arguments must be JSON"),
        ("search", "{}", "error: there is no tool 'search'"),
    ],
)
def test_a_bad_call_is_told_to_the_model(name: str, arguments: str, says: str) -> None:
    assert answer_call(name, arguments).startswith(says)
