"""Tools: what answers a turn of the policy, in the processes of `scoring.py`. Built in: a calculator.

A tool is a function of the conversation and of the question's metadata. `conversation` holds texts, the question first,
then turns of the policy and observations in turn; the last one is the turn to answer. The function returns the
observation, or None where there is nothing to answer: the response is then complete. It gets all that went before, so
an environment with a state can be rebuilt from it. Every process imports this module: it must stay free of torch and
pydantic.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fractions import Fraction
from typing import Any

from rl_platform.envs.reasoning.score import Score
from rl_platform.user_function import load_function, misfit

KEY = "rollout.multi_turn.tool"
Tool = Callable[[list[str], dict[str, Any]], str | None]


@dataclass(frozen=True)
class ToolCall:
    """What a tool is asked."""

    conversation: tuple[str, ...]
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ToolSpec:
    """Which tool: `rollout.multi_turn.tool`."""

    type: str

    @property
    def key(self) -> str:
        return KEY

    def load(self) -> Callable[[ToolCall], Score]:
        """A function whose scores carry the observation as `text`. Raises ConfigError if there is no such tool."""
        tool = load_tool(self.type)

        def answer(call: ToolCall) -> Score:
            observation = tool(list(call.conversation), call.metadata)
            if not isinstance(observation, str | None):
                raise TypeError(f"a tool answers with text or None, not with {observation!r}")
            return Score(0.0, text=observation)

        return answer


def load_tool(name: str) -> Tool:
    """The built-in tool or the user's function of that name. Raises ConfigError if there is none."""
    if name in TOOLS:
        return TOOLS[name]
    if ":" in name:
        return load_function(KEY, name, "function(conversation, metadata) -> str or None")
    near = get_close_matches(name, TOOLS, n=1)
    hint = f"did you mean {near[0]}?" if near else ""
    raise misfit(KEY, name, "no such tool", f"{', '.join(TOOLS)}, or module:function", hint)


# The calculator -------------------------------------------------------------------------------------------------------

_EXPRESSION = re.compile(r"[-+*/(). \d]*$")
_LONGEST_EXPRESSION = 200  # characters
_OPERATORS: dict[type[ast.AST], Callable[..., Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def calculator(conversation: Sequence[str], metadata: dict[str, Any]) -> str | None:
    """The value of the expression in front of a `=` that ends the turn; None for a turn without one.

    A turn that is nothing but `=` asks for the expression that ends the question. Numbers, + - * / and parentheses;
    what cannot be computed is answered with the reason.
    """
    question, turn = conversation[0], conversation[-1].strip()
    if not turn.endswith("="):
        return None
    expression = _EXPRESSION.search(turn[:-1] or question.rstrip())
    assert expression is not None  # it matches nothing at all, too
    try:
        return _text(evaluate(expression.group()))
    except ZeroDivisionError:
        return "error: division by zero"
    except ValueError as error:
        return f"error: {error}"


def evaluate(expression: str) -> Fraction:
    """The exact value. Raises ValueError for what is no arithmetic, ZeroDivisionError."""
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
            return Fraction(ast.get_source_segment(source, node) or "")  # as written: 0.1 is a tenth
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            return _OPERATORS[type(sign)](_value(left, source), _value(right, source))
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _OPERATORS:
            return _OPERATORS[type(sign)](_value(operand, source))
    raise ValueError("only numbers, + - * / and parentheses")


def _text(value: Fraction) -> str:
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.10g}"


TOOLS: dict[str, Tool] = {"calculator": calculator}
