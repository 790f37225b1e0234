"""Judges a config by the rules between its keys."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from rl_platform.config.explain import show
from rl_platform.config.rules import broken, without_effect
from rl_platform.config.rules.rule import Rule, text_of
from rl_platform.config.schema import Config
from rl_platform.errors import Problem


def check(
    config: Config, written: dict[str, Any], where: Callable[[str], str], doubtful: Collection[str] = ()
) -> list[Problem]:
    """All problems between the keys of `config`: broken rules, then written keys without effect.

    `written` is what the user wrote, without defaults. The keys in `doubtful` hold a default because what was written
    is wrong. Rules that involve one of them, and rules about a section from which one was left out, are not judged.
    Nor are rules about a written key that has no effect: removing it is the one thing to do.
    """
    values = config.model_dump(mode="json")

    def problem(rule: Rule, prefix: str = "", hint: str = "") -> Problem:
        message, hint = prefix + text_of(rule.message, config), hint or text_of(rule.hint, config)
        return Problem(rule.key, message, where(rule.key), show(_get(values, rule.key)), hint=hint)

    unread = _unread(config, written, doubtful)
    left_out = [key for key in doubtful if _get(written, key) is None]
    problems = [
        problem(rule)
        for rule in broken(config)
        if not _is_doubtful(rule, doubtful)
        and not any(_is_within(key, rule.key) for key in left_out)
        and not any(_is_within(rule.key, other.key) for other in unread)
    ]
    for rule in unread:
        hint = f"remove it, so that every key acts; an inherited one: {rule.key}: !unset"
        problems.append(problem(rule, "has no effect here: ", hint))
    return problems


def _is_doubtful(rule: Rule, doubtful: Collection[str]) -> bool:
    keys = (rule.key, *rule.involved)
    return any(_is_within(key, known) for key in keys for known in doubtful)


def _is_within(key: str, section: str) -> bool:
    return key == section or key.startswith(f"{section}.")


def _unread(config: Config, written: dict[str, Any], doubtful: Collection[str]) -> list[Rule]:
    """One rule for each written key or section without effect; none for keys inside a section that has none.

    An explicit null means off and is fine.
    """
    by_key: dict[str, list[Rule]] = {}
    for rule in sorted(without_effect(config), key=lambda rule: rule.key):  # a section comes before the keys inside it
        inside = any(rule.key.startswith(f"{section}.") for section in by_key)
        if not inside and _get(written, rule.key) is not None:
            by_key.setdefault(rule.key, []).append(rule)
    certain = ([rule for rule in rules if not _is_doubtful(rule, doubtful)] for rules in by_key.values())
    return [rules[0] for rules in certain if rules]


def _get(tree: dict[str, Any], key: str) -> Any:
    value: Any = tree
    for step in key.split("."):
        value = value.get(step) if isinstance(value, dict) else None
    return value
