"""The rules between keys, in a file per section: what is refused, and which keys have no effect.

The schema has the types and ranges of single keys.
"""

from __future__ import annotations

from collections.abc import Iterator

from rl_platform.config.rules import algorithm, cluster, data, env, models, reward, rollout, runner
from rl_platform.config.rules.rule import Rule
from rl_platform.config.schema import Config

_SECTIONS = (runner, models, algorithm, data, rollout, reward, env, cluster)
REFUSED = tuple(rule for section in _SECTIONS for rule in section.REFUSED)
WITHOUT_EFFECT = tuple(rule for section in _SECTIONS for rule in section.WITHOUT_EFFECT)


def broken(config: Config) -> Iterator[Rule]:
    """The rules that `config` breaks."""
    rules = (*REFUSED, *cluster.entry_rules(config), *env.entry_rules(config))
    return (rule for rule in rules if rule.when(config))


def without_effect(config: Config) -> Iterator[Rule]:
    """The rules of the keys and sections that `config` does not read. A section may come beside keys inside it."""
    return (rule for rule in WITHOUT_EFFECT if rule.when(config))
