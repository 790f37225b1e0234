"""Rules of `cluster`: which machines a run has, and which components are placed on them.

Whether the resources of a placement exist is decided by `placement/`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from rl_platform.config.rules.models import CRITIC_RULES
from rl_platform.config.rules.rule import Rule, embodied
from rl_platform.config.schema import Config
from rl_platform.config.suggest import nearest

PLACEMENT = "cluster.component_placement"
COMPONENTS = ("actor", "critic", "actor_critic", "reference", "rollout", "reward", "env")

_ADDRESS = re.compile(r"auto|[\w.-]+:\d+|\[[0-9a-fA-F:.]+\]:\d+")
_PARTS = (  # keys that decide which components a run has
    "runner.task_type",
    "critic.use_critic_model",
    "algorithm.use_kl_in_reward",
    "algorithm.use_kl_loss",
    "actor.lora",
    "reference.model",
)


def names_in(key: str) -> list[str]:
    """The component names of one key of `component_placement`."""
    return [name.strip() for name in key.split(",")]


def _placed(config: Config) -> list[str]:
    """All names in the order of the keys, with repetitions."""
    return [name for key in config.cluster.component_placement for name in names_in(key)]


def _critic_is_decided(config: Config) -> bool:
    """Whether the switch of the critic is right. If it is not, its own rule is the one problem to report."""
    return not any(rule.when(config) for rule in CRITIC_RULES)


def _needed(config: Config) -> dict[str, str]:
    """The components of the run, each with the reason."""
    if embodied(config):
        parts = ("actor_critic", "env", "rollout")
        return dict.fromkeys(parts, f"embodied training consists of {', '.join(parts)}")
    needed = dict.fromkeys(("actor", "rollout", "reward"), "reasoning needs actor, rollout and reward")
    if config.critic.use_critic_model and _critic_is_decided(config):
        needed["critic"] = "critic.use_critic_model is true"
    if config.has_reference:
        needed["reference"] = "the KL terms compare to it"
    return needed


def _missing(config: Config) -> list[str]:
    """The components of the run that have no place, and no misspelt name that is probably theirs."""
    placed = set(_placed(config))
    misspelt = {nearest(name, COMPONENTS) for name in placed if name not in COMPONENTS}
    if embodied(config) and "actor" in placed:
        placed.add("actor_critic")
    return [name for name in _needed(config) if name not in placed and name not in misspelt]


def _is_unneeded(config: Config, name: str) -> bool:
    if (embodied(config) and name == "actor") or (name == "critic" and not _critic_is_decided(config)):
        return False
    return name in COMPONENTS and name not in _needed(config)


def _why_unneeded(config: Config, name: str) -> str:
    if name == "reference" and config.reference_is_base:
        return "with actor.lora it is the actor without its adapters; reference.model would name another model"
    if name == "reference":
        return "no KL term is on: it would hold a model that nobody asks"
    if name == "critic":
        return "critic.use_critic_model is false"
    return f"{config.runner.task_type} training has no such component"


def _rules_of_name(key: str, name: str, count: int, position: int) -> Iterator[Rule]:
    """The rules of a component name in a key; it is the one at `position` of `count` with this name."""
    close = nearest(name, COMPONENTS)
    yield Rule(
        key,
        lambda config: name not in COMPONENTS,
        f"{name!r} is no component" if name else "a component name is missing at a comma",
        hint=f"did you mean {close}?" if close else f"components are {', '.join(COMPONENTS)}",
    )
    yield Rule(
        key,
        lambda config: name in COMPONENTS and count > 1 and position == count,
        f"{name} is named {count} times, but has one placement",
    )
    yield Rule(
        key,
        lambda config: _is_unneeded(config, name),
        lambda config: f"{name} is placed, but {_why_unneeded(config, name)}",
        _PARTS,
        f"take {name} out of this key",
    )


def entry_rules(config: Config) -> Iterator[Rule]:
    """The rules of each name in `component_placement`."""
    counts, seen = Counter(_placed(config)), Counter[str]()
    for key in config.cluster.component_placement:
        for name in names_in(key):
            seen[name] += 1
            yield from _rules_of_name(f"{PLACEMENT}.{key}", name, counts[name], seen[name])


def _differs_from_inventory(key: str, declared: str) -> Rule:
    def value(config: Config) -> int | None:
        value: int | None = getattr(config.cluster.inventory, declared)
        return value

    return Rule(
        f"cluster.{key}",
        lambda config: config.cluster.inventory is not None and getattr(config.cluster, key) != value(config),
        lambda config: f"cluster.inventory.{declared} says {value(config)}: they speak of the same cluster",
        (f"cluster.inventory.{declared}",),
        f"leave out cluster.{key}, or set it to null: it follows",
    )


REFUSED = (
    Rule(
        PLACEMENT,
        lambda config: embodied(config) and {"actor", "actor_critic"} <= set(_placed(config)),
        "actor and actor_critic are two names of one component here",
        hint="keep actor_critic",
    ),
    Rule(
        PLACEMENT,
        _missing,
        lambda config: (
            f"{', '.join(_missing(config))} without a place: "
            + "; ".join(dict.fromkeys(_needed(config)[name] for name in _missing(config)))
        ),
        _PARTS,
        lambda config: f"add {', '.join(_missing(config))} to one of the keys or as keys of their own",
    ),
    _differs_from_inventory("num_nodes", "nodes"),
    _differs_from_inventory("gpus_per_node", "gpus_per_node"),
    Rule(
        "cluster.inventory.gpu",
        lambda config: (
            (inventory := config.cluster.inventory) is not None
            and inventory.gpu is not None
            and inventory.gpus_per_node == 0
        ),
        "these nodes have no GPU (cluster.inventory.gpus_per_node is 0)",
        ("cluster.inventory.gpus_per_node",),
        "remove it",
    ),
    Rule(
        "cluster.devices_per_node",
        lambda config: config.cluster.devices_per_node is not None and config.cluster.gpus_per_node,
        lambda config: (
            f"CPU workers or GPUs: cluster.gpus_per_node says that there are {config.cluster.gpus_per_node} GPUs"
        ),
        ("cluster.gpus_per_node",),
        "keep one of them",
    ),
    Rule(
        "cluster.address",
        lambda config: config.cluster.address is not None and not _ADDRESS.fullmatch(config.cluster.address),
        "neither auto nor HOST:PORT of a Ray cluster's head",
        hint="as 10.0.0.1:6379",
    ),
)

WITHOUT_EFFECT = tuple(
    Rule(
        f"cluster.{name}",
        lambda config: config.cluster.runtime == "local",
        "cluster.runtime local is one process without Ray",
        ("cluster.runtime",),
    )
    for name in ("address", "restarts")
)
