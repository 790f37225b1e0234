"""Tools that answer turns of the policy, in the processes of `scoring.py`. Built in: a calculator.

A tool is a function of a conversation and the question's metadata. `conversation` is a list of texts: the question,
then alternating turns of the policy and observations, up to the turn to answer. The function returns the observation,
or None if there is none: the response is then complete. It gets the whole conversation, so it can rebuild the state of
an environment. Every process imports this module, so it must not import torch or pydantic.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Protocol

from rl_platform.envs.reasoning.score import Score
from rl_platform.user_code import Extension


class Tool(Protocol):
    """A tool that answers the policy's turns, see above."""

    def __call__(self, conversation: list[str], metadata: dict[str, object], /) -> str | None:
        """Returns the observation after the last turn, or None if the response is complete."""


TOOL = Extension("tool", "rollout.multi_turn.tool", Tool, "function(conversation, metadata) -> str or None")


@dataclass(frozen=True)
class ToolCall:
    """The arguments of a tool."""

    conversation: tuple[str, ...]
    metadata: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class ToolSpec:
    """The name of a tool, `rollout.multi_turn.tool`."""

    type: str

    @property
    def key(self) -> str:
        return TOOL.key

    def load(self) -> Callable[[ToolCall], Score]:
        """Returns a function whose scores have the observation as `text`. Raises ConfigError for an unknown tool."""
        tool = load_tool(self.type)

        def answer(call: ToolCall) -> Score:
            observation = tool(list(call.conversation), call.metadata)
            if not isinstance(observation, str | None):
                raise TypeError(f"a tool answers with text or None, not with {observation!r}")
            return Score(0.0, text=observation)

        return answer


def load_tool(name: str) -> Tool:
    """Returns the built-in tool or the user's function of that name. Raises ConfigError if there is none."""
    tool: Tool = TOOLS[name] if name in TOOLS else TOOL.load(name)
    return tool


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


def calculator(conversation: Sequence[str], metadata: dict[str, object]) -> str | None:
    """Returns the value of the expression before a `=` at the end of the turn; None for a turn without `=`.

    For a turn that is only `=` it evaluates the expression at the end of the question. Expressions have numbers,
    + - * / and parentheses; for others it returns the error as text.
    """
    question, turn = conversation[0], conversation[-1].strip()
    if not turn.endswith("="):
        return None
    expression = _EXPRESSION.search(turn[:-1] or question.rstrip())
    assert expression is not None  # it also matches the empty text
    try:
        return _text(evaluate(expression.group()))
    except ZeroDivisionError:
        return "error: division by zero"
    except ValueError as error:
        return f"error: {error}"


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


def _text(value: Fraction) -> str:
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.10g}"


TOOLS: dict[str, Tool] = {"calculator": calculator}
