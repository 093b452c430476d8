"""The calculator tool: `+ - * / **`, parentheses and unary minus over exact fractions."""

from __future__ import annotations

import ast
import json
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluates an arithmetic expression with + - * / ** and parentheses.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "for example (3 + 4) * 2.5"}},
            "required": ["expression"],
        },
    },
}

MAX_LENGTH = 200  # characters, which bounds nesting
# Of a numerator or denominator on the way; with the length it bounds time. No less than the length without powers.
MAX_DIGITS = 300
ERROR = "error: "  # what the text of a call that gave no result begins with
DECIMALS = 10  # places of a result that has no end, such as 1/3
ALLOWED = set("0123456789.+-*/() ")
LARGEST = 10**MAX_DIGITS
TOO_LARGE = f"a number with more than {MAX_DIGITS} digits"
SYNTAX = "only numbers and + - * / ** ( ) are allowed"


class CalculatorError(Exception):
    """An expression that has no value; the text is meant for the model."""


def calculate(expression: str) -> str:
    """The value of `expression` in decimal digits: exact where they end, else rounded to 10 places.

    Raises:
        CalculatorError: It is no expression of this calculator, too long or too large, or divides by zero.
    """
    return format_number(work_out(expression))


def work_out(expression: str) -> Fraction:
    """The value of `expression`, exactly.

    Raises:
        CalculatorError: It is no expression of this calculator, too long or too large, or divides by zero.
    """
    source = expression.replace(",", "").strip()
    if len(source) > MAX_LENGTH:
        raise CalculatorError(f"the expression is longer than {MAX_LENGTH} characters")
    if unknown := sorted(set(source) - ALLOWED):
        raise CalculatorError(f"{SYNTAX}, not {' '.join(unknown)}")
    try:
        tree = ast.parse(source, mode="eval")
    except SyntaxError as error:
        raise CalculatorError("not a valid expression") from error
    try:
        return _value(tree.body, source)
    except ZeroDivisionError as error:
        raise CalculatorError("division by zero") from error


def format_number(value: Fraction) -> str:
    """`value` in decimal digits: `42`, `2.5`, `0.3333333333`."""
    places = _places(value.denominator)
    scaled = str(abs(round(value * 10**places))).rjust(places + 1, "0")
    digits = f"{scaled[:-places]}.{scaled[-places:]}".rstrip("0").rstrip(".") if places else scaled
    return f"-{digits}" if value < 0 and digits != "0" else digits


def answer_call(name: str, arguments: str) -> str:
    """The text to return for one tool call; what is wrong with the call is said to the model.

    Args:
        name: the function that the model named.
        arguments: its arguments, a JSON object as text.
    """
    if name != "calculator":
        return f"{ERROR}there is no tool {name!r}, only calculator"
    try:
        expression = json.loads(arguments)["expression"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return ERROR + 'the arguments must be JSON like {"expression": "1 + 2"}'
    try:
        return calculate(str(expression))
    except CalculatorError as error:
        return f"{ERROR}{error}"


def _value(node: ast.expr, source: str) -> Fraction:
    match node:
        case ast.Constant(value=int() | float()):
            # From the source's digits: the parser's float would have lost some.
            return Fraction(ast.get_source_segment(source, node) or "")
        case ast.UnaryOp(op=ast.USub()):
            return -_value(node.operand, source)
        case ast.UnaryOp(op=ast.UAdd()):
            return _value(node.operand, source)
        case ast.BinOp(op=op) if type(op) in OPERATIONS:
            value = OPERATIONS[type(op)](_value(node.left, source), _value(node.right, source))
            if max(abs(value.numerator), value.denominator) >= LARGEST:
                raise CalculatorError(TOO_LARGE)
            return value
    raise CalculatorError(SYNTAX)


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    """`base ** exponent` for whole exponents, refused before it is worked out where it would be too large."""
    if exponent.denominator != 1:
        raise CalculatorError("the exponent of ** must be a whole number")
    bits = max(base.numerator.bit_length(), base.denominator.bit_length()) - 1
    if bits * abs(exponent) > LARGEST.bit_length():
        raise CalculatorError(TOO_LARGE)
    return Fraction(base**exponent.numerator)


OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: _power,
}


def _places(denominator: int) -> int:
    """How many decimals 1/denominator has, if it ends; else DECIMALS."""
    twos = fives = 0
    while denominator % 2 == 0:
        denominator, twos = denominator // 2, twos + 1
    while denominator % 5 == 0:
        denominator, fives = denominator // 5, fives + 1
    return max(twos, fives) if denominator == 1 else DECIMALS
