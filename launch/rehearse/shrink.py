"""Shrinks a config: `shrunk` returns the config of a rehearsal and the list of what differs from the original.

The table of `shrink_rules.py` has the new values. Pure: nothing is read or written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rl_platform.config.differences import flat
from rl_platform.config.schema import Config
from rl_platform.config.source import Tree
from rl_platform.launch.rehearse.rehearsal_sizes import Materials, Sizes
from rl_platform.launch.rehearse.shrink_rules import RULES, Kind, Rule
from rl_platform.launch.rehearse.small_placement import small_cluster
from rl_platform.placement.inventory import inventory_for
from rl_platform.placement.scheduler import Placement, schedule

_FREE = (
    "cluster.component_placement",
    "cluster.inventory",
    "data.task.params",
    "env.kwargs",
    "rollout.engine_args",
    "rollout.engine_env",
)
_CLUSTER = Rule("cluster", lambda sizes: None, "CPU workers of this machine in the same shape")


@dataclass(frozen=True)
class Change:
    """A key whose value differs in the rehearsal. replaced: another thing is in its place, not only a smaller one."""

    key: str
    before: object
    after: object
    kind: Kind
    why: str


def shrunk(config: Config, placement: Placement, materials: Materials) -> tuple[Config, list[Change]]:
    """Returns the config of the rehearsal and every key in which it differs from `config`.

    placement: that of `config`. materials: what is put in place of files and engines.
    """
    cluster = small_cluster(config, placement)
    section = config.cluster.model_copy(update=cluster)
    sizes = Sizes(config, placement, cluster, schedule(section, inventory_for(section)), materials)
    tree = config.model_dump()
    rules: dict[str, Rule] = {}
    for rule in RULES:
        if rule.applies(sizes):
            for key, value in _leaves(rule.key, rule.value(sizes)):
                if _put(tree, key, value):
                    rules[key] = rule
    if "rollout.backend" in rules:
        rules["rollout.backend"] = replace(rules["rollout.backend"], why=materials.why_backend)
    tree["cluster"].update(cluster)
    small = Config.model_validate(tree)
    return small, list(_differences(config, small, rules, materials.folder))


def _leaves(key: str, value: object) -> Iterator[tuple[str, object]]:
    """Yields a mapping of keys as single keys."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield f"{key}.{name}", inner
    else:
        yield key, value


def _put(tree: Tree, key: str, value: object) -> bool:
    """Sets a key unless one of the sections around it is null."""
    *sections, leaf = key.split(".")
    for name in sections:
        if tree[name] is None:
            return False
        tree = tree[name]
    tree[leaf] = value
    return True


def _differences(config: Config, small: Config, rules: Mapping[str, Rule], folder: Path) -> Iterator[Change]:
    """Yields the changes; paths in `folder`, which is removed, are relative to it."""
    before, after = flat_keys(config), flat_keys(small)
    for key in [*before, *(key for key in after if key not in before)]:
        if before.get(key) != after.get(key):
            rule = next((rules[name] for name in _enclosing(key) if name in rules), _CLUSTER)
            value = after.get(key)
            shown = value.removeprefix(f"{folder}/") if isinstance(value, str) else value
            yield Change(key, before.get(key), shown, rule.kind, rule.why)


def flat_keys(config: Config) -> dict[str, object]:
    """Returns the config as dotted keys. Placements, parameters and options of engines are single values."""
    return flat(config.model_dump(mode="json"), whole=_FREE)


def _enclosing(key: str) -> Iterator[str]:
    while key:
        yield key
        key = key.rpartition(".")[0]
