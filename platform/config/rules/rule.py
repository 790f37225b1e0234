"""The one type of rule between keys, and what the rules of several sections share."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from rl_platform.config.schema import Config

TASK, CHUNKS = "runner.task_type", "actor.model.num_action_chunks"
FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")  # module:function

Condition = Callable[[Config], object]
Text = str | Callable[[Config], str]


@dataclass(frozen=True)
class Rule:
    """A config for which `when` is true breaks the rule (lists `REFUSED`) or does not read `key` (`WITHOUT_EFFECT`).

    key: where the problem is reported.
    message: the reason.
    involved: the other keys that take part. The rule is not judged while one of them is itself wrong.
    hint: what the user can do.
    """

    key: str
    when: Condition
    message: Text
    involved: tuple[str, ...] = ()
    hint: Text = ""


def only(condition: Condition, *rules: Rule) -> tuple[Rule, ...]:
    """The rules, each restricted to configs for which `condition` is true too."""

    def restricted(when: Condition) -> Condition:
        return lambda config: condition(config) and when(config)

    return tuple(replace(rule, when=restricted(rule.when)) for rule in rules)


def always(config: Config) -> bool:
    """The condition of a rule that `only` restricts enough."""
    return True


def embodied(config: Config) -> bool:
    return config.runner.task_type == "embodied"


def reasoning(config: Config) -> bool:
    return config.runner.task_type == "reasoning"


def text_of(text: Text, config: Config) -> str:
    return text if isinstance(text, str) else text(config)
