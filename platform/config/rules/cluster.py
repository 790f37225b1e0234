"""Rules of `cluster`: which machines a run has, and which components are placed on them.

Whether the resources of a placement exist is decided by `placement/`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial

from rl_platform.config.placement_names import read_names
from rl_platform.config.rules.models import critic_problem
from rl_platform.config.rules.rule import Unread, embodied, unread_keys, when
from rl_platform.config.schema import Config
from rl_platform.config.schema.cluster import COMPONENTS, PLACEMENT
from rl_platform.errors import Problem
from rl_platform.suggest import nearest

_ADDRESS = re.compile(r"auto|[\w.-]+:\d+|\[[0-9a-fA-F:.]+\]:\d+")


def refused(config: Config) -> Iterator[Problem]:
    """Yields the problems of the keys of `cluster`."""
    cluster, inventory = config.cluster, when(lambda: config.cluster.inventory)
    if missing := when(lambda: _missing(config)):
        reasons = "; ".join(dict.fromkeys(missing.values()))
        names = ", ".join(missing)
        hint = f"add {names} to one of the keys, or as separate keys"
        yield Problem(PLACEMENT, f"{names} without a placement: {reasons}", hint=hint)
    if inventory is not None:
        if when(lambda: cluster.num_nodes != inventory.nodes):
            yield _differs("num_nodes", "nodes", inventory.nodes)
        if when(lambda: cluster.gpus_per_node != inventory.gpus_per_node):
            yield _differs("gpus_per_node", "gpus_per_node", inventory.gpus_per_node)
        if when(lambda: inventory.gpu is not None and inventory.gpus_per_node == 0):
            message = "these nodes have no GPU (cluster.inventory.gpus_per_node is 0)"
            yield Problem("cluster.inventory.gpu", message, hint="remove it")
    if when(lambda: inventory is None or inventory.gpu is None):
        for position in when(lambda: _groups_with_a_gpu(config)) or ():
            message = "this is for plans of a cluster whose GPUs are named, and cluster.inventory.gpu is not set"
            yield Problem(f"cluster.node_groups[{position}].gpu", message, hint="set cluster.inventory.gpu too")
    if when(lambda: cluster.devices_per_node is not None and cluster.gpus_per_node):
        message = f"CPU workers cannot emulate GPUs beside real ones: cluster.gpus_per_node is {cluster.gpus_per_node}"
        yield Problem("cluster.devices_per_node", message, hint="remove one of the two keys")
    if when(lambda: cluster.address is not None and not _ADDRESS.fullmatch(cluster.address)):
        message = "neither auto nor the HOST:PORT of a Ray cluster's head"
        yield Problem("cluster.address", message, hint="for example 10.0.0.1:6379")
    if reason := when(lambda: _why_no_move(config)):
        hint = "cluster.reallocate=suggest"
        yield Problem("cluster.reallocate", reason, value="auto", allowed="off, suggest", hint=hint)
    placed, problems = read_names(when(lambda: cluster.component_placement) or ())
    yield from problems
    for key, components in placed.items():
        for name in components:
            if reason := when(partial(_why_unneeded, config, name)):
                message, hint = f"{name} has a placement, but {reason}", f"remove {name} from this key"
                yield Problem(f"{PLACEMENT}.{key}", message, hint=hint)


def unread(config: Config) -> Iterator[Unread]:
    """Yields the keys of `cluster` that this config does not read, each with the reason."""
    if when(lambda: config.cluster.runtime == "local"):
        reason = "cluster.runtime local is one process without Ray"
        keys = "address restarts restart_backoff_s collective_timeout_s reallocate"
        yield from unread_keys("cluster", keys, reason, "cluster.runtime")
    elif when(lambda: config.cluster.restarts == 0):
        yield from unread_keys("cluster", "restart_backoff_s", "cluster.restarts is 0", "cluster.restarts")


def _why_no_move(config: Config) -> str:
    """Returns why a run cannot move to another placement; empty if it can, or is not to."""
    if config.cluster.reallocate != "auto":
        return ""
    if config.cluster.node_groups:
        return "a move would leave the node groups of this config (cluster.node_groups)"
    if embodied(config) and not config.runner.trust_checkpoint:
        return "a move loads the state of the environments, which may run code (runner.trust_checkpoint)"
    return ""


def _groups_with_a_gpu(config: Config) -> list[int]:
    return [position for position, group in enumerate(config.cluster.node_groups) if group.gpu is not None]


def _differs(key: str, declared: str, value: int) -> Problem:
    message = f"cluster.inventory.{declared} is {value}, and both keys describe the same cluster"
    return Problem(f"cluster.{key}", message, hint=f"remove cluster.{key}; cluster.inventory sets it")


def _placed(config: Config) -> list[str]:
    """Returns all names in the order of the keys, with repetitions."""
    return [name for key in config.cluster.component_placement for name in map(str.strip, key.split(","))]


def _needed(config: Config) -> dict[str, str]:
    """Returns the components of the run, each with the reason; the critic if its switch has no problem of its own."""
    if embodied(config):
        parts = ("actor_critic", "env", "rollout")
        return dict.fromkeys(parts, f"embodied training needs {', '.join(parts)}")
    needed = dict.fromkeys(("actor", "rollout", "reward"), "reasoning needs actor, rollout and reward")
    if config.critic.use_critic_model and critic_problem(config) is None:
        needed["critic"] = "critic.use_critic_model is true"
    if config.has_reference:
        needed["reference"] = "the KL terms compare to it"
    return needed


def _missing(config: Config) -> dict[str, str]:
    """Returns the components of the run that have no place, and no misspelt name or name without its comma that is
    probably theirs; with the reasons."""
    placed = {word for name in _placed(config) for word in (name, *name.split())}
    placed |= {nearest(name, COMPONENTS) or name for name in placed if name not in COMPONENTS}
    if embodied(config) and "actor" in _placed(config):
        placed.add("actor_critic")
    return {name: reason for name, reason in _needed(config).items() if name not in placed}


def _why_unneeded(config: Config, name: str) -> str:
    """Returns why the run has no such component, "" if it has one or the switch of the critic has a problem of its
    own."""
    if name in _needed(config) or (embodied(config) and name == "actor"):
        return ""
    if name == "critic" and critic_problem(config) is not None:
        return ""
    if name == "reference" and config.reference_is_base:
        return "with actor.lora it is the actor without its adapters; reference.model would name another model"
    if name == "reference":
        return "no KL term is on, so the run does not use it"
    if name == "critic":
        return "critic.use_critic_model is false"
    return f"{config.runner.task_type} training has no such component"
