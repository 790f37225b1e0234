"""The tool of `rollout.multi_turn.tool`, which answers turns of the policy in a `ScoringPool`. Built in: a calculator.

Every process of the pool imports this module, so it must not import torch or pydantic.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from fractions import Fraction

from rl_platform.components.agents.agent_function import TOOL, Tool
from rl_platform.envs.reasoning.answers.arithmetic import evaluate
from rl_platform.envs.reasoning.score import Score

_EXPRESSION = re.compile(r"(?:[-+*/() \d]++|\.(?! ))*+$")  # a period before a blank ends a sentence
_PART = re.compile(r"[^\s:;=]([^ ]|$)|. *[-+*/] ")  # the end of a longer expression: `^3+1`, `x + 1`


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
            # conversations of one question that arrive together share the metadata, which the tool may change
            observation = tool(list(call.conversation), deepcopy(call.metadata))
            if not isinstance(observation, str | None):
                raise TypeError(f"a tool answers with text or None, not with {observation!r}")
            return Score(0.0, text=observation)

        return answer


def load_tool(name: str) -> Tool:
    """Returns the built-in tool or the user's function of that name. Raises ConfigError if there is none."""
    tool: Tool = TOOLS[name] if name in TOOLS else TOOL.load(name)
    return tool


def calculator(conversation: Sequence[str], metadata: dict[str, object]) -> str | None:
    """Returns the value of the expression before a `=` at the end of the turn; None for a turn without `=`.

    For a turn that is only `=` it evaluates the expression at the end of the question. Expressions have numbers,
    + - * / and parentheses; for others, as `2^3+1=`, it returns the error as text.
    """
    question, turn = conversation[0], conversation[-1].strip()
    if not turn.endswith("="):
        return None
    text = turn[:-1] or question.rstrip()
    expression = _EXPRESSION.search(text)
    assert expression is not None  # it also matches the empty text
    start = expression.start()
    return computed(text if start and _PART.match(text, start - 1) else expression.group())


def computed(expression: str) -> str:
    """Returns the value of a whole expression as text, or the error as text."""
    try:
        if _EXPRESSION.fullmatch(expression) is None:
            raise ValueError("only numbers, + - * / and parentheses")
        return _text(evaluate(expression))
    except ZeroDivisionError:
        return "error: division by zero"
    except ValueError as error:
        return f"error: {error}"


def _text(value: Fraction) -> str:
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.10g}"


TOOLS: dict[str, Tool] = {"calculator": calculator}
