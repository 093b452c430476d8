"""A calculator for plain expressions: digits, `+ - * / ( )` and the decimal point, worked out exactly."""

from __future__ import annotations

import ast
from fractions import Fraction

MAX_LENGTH = 200


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float()) if not isinstance(node.value, bool):
            return Fraction(str(node.value))
        case ast.UnaryOp(op=ast.USub()):
            return -_value(node.operand)
        case ast.BinOp(op=ast.Add()):
            return _value(node.left) + _value(node.right)
        case ast.BinOp(op=ast.Sub()):
            return _value(node.left) - _value(node.right)
        case ast.BinOp(op=ast.Mult()):
            return _value(node.left) * _value(node.right)
        case ast.BinOp(op=ast.Div()):
            return _value(node.left) / _value(node.right)
    raise ValueError("only numbers, + - * / and brackets are allowed")


def calculate(expression: str) -> Fraction:
    """Work an expression out exactly.

    Raises:
        ValueError: If it is no plain expression, is too long, or divides by zero.
    """
    if len(expression) > MAX_LENGTH:
        raise ValueError("the expression is too long")
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ZeroDivisionError, RecursionError, MemoryError) as error:
        raise ValueError(f"cannot work out {expression!r}") from error


def plain(value: Fraction) -> str:
    """A number as the calculator writes it: integers without a point, others to six decimals at most."""
    if value.denominator == 1:
        return str(value.numerator)
    return f"{float(value):.6f}".rstrip("0").rstrip(".")


def respond(expression: object) -> str:
    """The calculator tool's reply to one call: the number, or `error`."""
    try:
        return plain(calculate(str(expression)))
    except ValueError:
        return "error"
