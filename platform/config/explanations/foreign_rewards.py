"""Recognises reward functions of verl and TRL by the names of their parameters.

Their arguments come in another order than here. A function whose number of parameters fits would score garbage, so it
is refused before the start, with the line that adapts it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from rl_platform.user_code import Extension

_RESPONSE = ("response", "solution_str", "predict_str", "prediction", "pred", "completion", "generation")
_ANSWER = ("answer", "ground_truth", "gold", "target", "reference", "expected", "label")
_PROMPT = ("prompt", "question")  # not among the arguments
_PLACES = {  # names, in our order
    **dict.fromkeys(_RESPONSE, 0),
    **dict.fromkeys(_ANSWER, 1),
    **dict.fromkeys(("metadata", "extra_info"), 2),
    **dict.fromkeys((*_PROMPT, "data_source"), -1),
}
_VERL = {"data_source", "solution_str", "ground_truth", "extra_info"}
_TRL = {"completions", "prompts", "completion_ids"}
_DOCS = "docs/reasoning.md#functions-of-verl-and-trl"


class RewardExtension(Extension):
    """The kind of user code that scores responses."""

    def function(self, name: str, loaded: object) -> Callable[..., Any]:
        """Returns the function. Raises ConfigError if it cannot be called as the protocol says, or if the names of its
        parameters belong to another order of arguments."""
        names = _names(loaded)
        if _TRL & {*names}:
            own = name.rpartition(":")[2]
            keywords = [f"{key}={value}" for key, value in _trl_arguments(names).items()]
            line = f"return {own}({', '.join(keywords)})[0]"
            raise self._foreign(name, "TRL's, which scores lists", names, line)
        if any(_PLACES.get(each, place) != place for place, each in enumerate(names[:3])):
            whose = "verl's" if _VERL & {*names} else "in another order"
            raise self._foreign(name, whose, names, f"return {name.rpartition(':')[2]}({_verl_arguments(names)})")
        return super().function(name, loaded)

    def _foreign(self, name: str, whose: str, names: list[str], line: str) -> Exception:
        message = f"its parameters ({', '.join(names)}) are {whose}; it is called with (response, answer, metadata)"
        hint = f"name a function that adapts it: def reward(response, answer, metadata): {line} ({_DOCS})"
        return self.misfit(name, message, hint)


def of_rewards(kind: Extension) -> Extension:
    """Returns this kind of user code, of which functions of other systems are refused."""
    return RewardExtension(kind.kind, kind.key, kind.protocol, kind.usage)


def _trl_arguments(names: list[str]) -> dict[str, str]:
    """Returns the arguments of a function of TRL for one response. Columns of the data set are lists there.

    The prompt is not among what a reward function gets here.
    """
    known = {"prompts": "[None]", "completions": "[response]", "answer": "[answer]"}
    columns = {each: known.get(each, f'[metadata.get("{each}")]') for each in names}
    return {"completions": "[response]", **columns}


def _verl_arguments(names: list[str]) -> str:
    known = {**dict.fromkeys(_RESPONSE, "response"), **dict.fromkeys(_ANSWER, "answer"), "metadata": "metadata"}
    known |= dict.fromkeys(_PROMPT, "None")
    return ", ".join(known.get(each, f'metadata.get("{each}")') for each in names)


def _names(loaded: object) -> list[str]:
    """Returns the names of the parameters that take one argument each; none for what has no signature."""
    if inspect.isclass(loaded):
        loaded = getattr(loaded, "__call__", loaded)  # noqa: B004  the method of its instances, not of the class
    try:
        parameters = inspect.signature(loaded).parameters.values()  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return []
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [each.name for each in parameters if each.kind not in several and each.name != "self"]
