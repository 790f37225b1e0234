"""The rules between keys, in a file per section: what is refused, and which keys have no effect.

The schema has the types and ranges of single keys. Without this extra, every config with valid keys is accepted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from rl_platform.config.rules import algorithm, cluster, data, env, models, reward, rollout, runner
from rl_platform.config.rules.rule import Unread
from rl_platform.config.schema import Config
from rl_platform.config.schema.section import Unreadable
from rl_platform.errors import Problem

_SECTIONS = (runner, models, algorithm, data, rollout, reward, env, cluster)


def broken(config: Config) -> Iterator[Problem]:
    """Yields the problems between the keys of `config`, without their places."""
    for section in _SECTIONS:
        with suppress(Unreadable):  # a rule that reads a wrong key outside `when` ends those of its section
            yield from section.refused(config)


def without_effect(config: Config) -> Iterator[Unread]:
    """Yields the keys and sections that `config` does not read. A section may come beside keys inside it."""
    for section in _SECTIONS:
        with suppress(Unreadable):
            yield from section.unread(config)
