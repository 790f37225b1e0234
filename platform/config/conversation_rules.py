"""Rules about responses of several turns, `rollout.multi_turn`. `checks.py` reports them."""

from __future__ import annotations

from collections.abc import Iterator

from rl_platform.config.rules import FUNCTION, BrokenRule
from rl_platform.config.schema import Config
from rl_platform.config.suggest import nearest

MULTI_TURN = "rollout.multi_turn"
_TOOLS = ("calculator",)
_BETWEEN_TURNS = 2  # tokens of a response that are not an observation, at least: one per turn


def broken_conversation_rules(config: Config) -> Iterator[BrokenRule]:
    """Of a reasoning config."""
    options, data = config.rollout.multi_turn, config.data
    if options is None:
        if data.task is not None and data.task.type == "digits" and data.task.params.get("operation") == "quotient":
            message = f"quotient is scored after a turn that asks the calculator, and {MULTI_TURN} is null"
            hint = f"{MULTI_TURN}: {{tool: calculator}}"
            yield BrokenRule("data.task.params", message, (MULTI_TURN, "data.task.type"), hint)
        return
    if options.tool not in _TOOLS and not FUNCTION.fullmatch(options.tool):
        close = nearest(options.tool, _TOOLS)
        message = f"neither {', '.join(_TOOLS)} nor a function written as module:function"
        yield BrokenRule(f"{MULTI_TURN}.tool", message, hint=f"did you mean {close}?" if close else "")
    longest = data.max_response_length - _BETWEEN_TURNS
    if options.max_observation_tokens > longest:
        message = (
            f"data.max_response_length, {data.max_response_length} tokens, counts observations too: after one of that "
            "length there is no room for a turn"
        )
        hint = f"at most {longest}, or raise data.max_response_length" if longest > 0 else "raise it"
        yield BrokenRule(f"{MULTI_TURN}.max_observation_tokens", message, ("data.max_response_length",), hint)
