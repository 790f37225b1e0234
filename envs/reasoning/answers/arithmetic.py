"""Exact values of arithmetic expressions, of answers and for the calculator of multi-turn runs."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from fractions import Fraction

_LONGEST_EXPRESSION = 200  # characters
_OPERATORS: dict[type[ast.AST], Callable[..., Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def evaluate(expression: str) -> Fraction:
    """Returns the exact value. Raises ValueError for other than arithmetic expressions, and ZeroDivisionError."""
    if len(expression) > _LONGEST_EXPRESSION:
        raise ValueError("the expression is too long")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, MemoryError, RecursionError):
        raise ValueError("not an expression") from None
    return _value(tree.body, expression.strip())


def _value(node: ast.AST, source: str) -> Fraction:
    match node:
        case ast.Constant(value=int() | float()):
            return Fraction(ast.get_source_segment(source, node) or "")  # 0.1 is exactly 1/10
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            return _OPERATORS[type(sign)](_value(left, source), _value(right, source))
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _OPERATORS:
            return _OPERATORS[type(sign)](_value(operand, source))
    raise ValueError("only numbers, + - * / and parentheses")
