"""The placement of an RLinf config: components, the GPUs it needs, and engines of several GPUs."""

from __future__ import annotations

import re
from collections.abc import Mapping

from rl_platform.launch.tools.convert.outcome import (
    ForeignConfig,
    Outcome,
    Value,
    number,
    part_of,
    same,
    untranslated,
    whole,
    write,
)
from rl_platform.launch.tools.convert.rlinf_embodied import embodied

_COMPONENTS = ("actor", "critic", "rollout", "reward", "env")
_GPUS = 8  # of a node in RLinf's examples


def placement(value: Value, source: ForeignConfig) -> Outcome:
    """The grammar is ours."""
    if not isinstance(value, dict):
        return untranslated("a mapping of components to resources")
    lost: list[str] = []
    placed: dict[str, Value] = {}
    for names, place in value.items():
        named = [name.strip() for name in str(names).split(",")]
        lost += [name for name in named if name not in (*_COMPONENTS, "inference")]
        if kept := _components(named, source):
            placed[",".join(kept)] = str(place) if isinstance(place, int) else place
    if not embodied(source) and not any("reward" in names.split(",") for names in placed):
        placed = {
            f"{names},reward" if "rollout" in names.split(",") else names: place for names, place in placed.items()
        }
    values, why = _inventory(placed, source)
    values = {"cluster.component_placement": _with_engines(placed, source, values), **values}
    return untranslated(f"no component {', '.join(lost)} here", values) if lost else write(values, why)


def node_groups(value: Value, source: ForeignConfig) -> Outcome:
    """Returns labels, nodes and environment variables. A robot's group has no GPUs."""
    last = source.whole("cluster.num_nodes", 1) - 1
    every = f"0-{last}" if last else "0"
    groups: list[Value] = []
    robots = []
    for group in value if isinstance(value, list) else []:
        if not isinstance(group, dict):
            raise TypeError(f"{group} is not a group")
        ranks, label = str(group["node_ranks"]), str(group["label"])
        ours: dict[str, Value] = {"label": label, "node_ranks": every if ranks == "all" else ranks}
        variables = [pair for each in group.get("env_configs", ()) for pair in each.get("env_vars", ())]
        if variables:
            ours["env_vars"] = {name: str(text) for pair in variables for name, text in pair.items()}
        if "hardware" in group:
            robots.append(label)
            ours["accelerators"] = 0
        groups.append(ours)
    values: dict[str, Value] = {"cluster.node_groups": groups}
    if robots:
        return untranslated(f"{', '.join(robots)}: the environment opens its robot itself", values)
    return write(values)


def _inventory(placed: Mapping[str, Value], source: ForeignConfig) -> tuple[dict[str, Value], str]:
    """Returns the nodes and GPUs that a placement needs, and how they are known; nothing if one GPU is enough."""
    nodes = source.whole("cluster.num_nodes", 1)
    places = [str(place.get("placement", "all") if isinstance(place, dict) else place) for place in placed.values()]
    resources = [part.partition(":")[0] for place in places for part in place.split(",")]
    last = max((int(index) for each in resources for index in re.findall(r"\d+", each)), default=0)
    sizes = ("tensor", "pipeline", "context", "expert")
    split = [f"{role}.model.{size}_model_parallel_size" for role in ("actor", "critic") for size in sizes]
    one = nodes == 1 or not source("cluster.node_groups")
    if one and not last and all(source.whole(key, 1) == 1 for key in (*split, "rollout.tensor_parallel_size")):
        return {}, ""
    named = "all" not in resources
    per_node = -(-(last + 1) // nodes) if named else max(_GPUS, -(-(last + 1) // nodes))
    why = "" if named else f"the file does not say how many GPUs a node has: {per_node} assumed"
    return {"cluster.inventory.nodes": nodes, "cluster.inventory.gpus_per_node": per_node}, why


def _with_engines(placed: dict[str, Value], source: ForeignConfig, inventory: Mapping[str, Value]) -> dict[str, Value]:
    """Returns the placement with engines of several GPUs in a key of their own."""
    owned = source.whole("rollout.tensor_parallel_size", 1)
    names = next((names for names in placed if "rollout" in names.split(",")), None)
    if owned == 1 or names is None or not inventory:
        return placed
    place = str(placed[names])
    gpus = whole(inventory["cluster.inventory.nodes"]) * whole(inventory["cluster.inventory.gpus_per_node"])
    span = f"0-{gpus - 1}" if place == "all" else place
    match = re.fullmatch(r"(\d+)-(\d+)", span)
    if match is None or (int(match[2]) - int(match[1]) + 1) % owned:  # ranks are named, or the GPUs have gaps
        return placed
    last = (int(match[2]) - int(match[1]) + 1) // owned - 1
    others = {",".join(name for name in names.split(",") if name != "rollout"): placed[names]} if "," in names else {}
    rest = {key: value for key, value in placed.items() if key != names}
    return {**others, **rest, "rollout": f"{span}:0-{last}" if last else f"{span}:0"}


def _components(names: list[str], source: ForeignConfig) -> list[str]:
    """Our components for those of a key. The reference, which RLinf computes in the actor, joins it for a KL term.

    With adapters the actor without them is the reference.
    """
    kept = [name for name in names if name in _COMPONENTS]
    if embodied(source):
        return [
            "actor_critic" if name == "actor" and shared_heads(source) else name for name in kept if name != "reward"
        ]
    with_kl = source.positive("algorithm.kl_beta") or source.positive("algorithm.reinpp_kl_beta")
    joins = with_kl and "actor" in kept and not source("actor.model.is_lora")
    return [*kept, "reference"] if joins else kept


def shared_heads(source: ForeignConfig) -> bool:
    """Returns whether policy and value head are one model, as GAE needs it in embodied runs here."""
    with_gae = embodied(source) and source("algorithm.adv_type") == "gae"
    return with_gae or source("algorithm.loss_type") in ("actor_critic", "decoupled_actor_critic")


def share_processes(source: ForeignConfig) -> bool:
    """Returns whether actor and rollout are in one key of the placement, or all components on one GPU, so in one
    process."""
    places = source("cluster.component_placement")
    if isinstance(places, dict) and {str(place) for place in places.values()} <= {"0", "0-0"}:
        return source("cluster.num_nodes") in (None, 1)
    keys = [{name.strip() for name in str(names).split(",")} for names in places] if isinstance(places, dict) else []
    return any({"actor", "rollout"} <= names for names in keys)


def tensor_parallel(value: Value, source: ForeignConfig) -> Outcome:
    """Translates the GPUs of a rollout rank, which are part of our placement."""
    if value in (None, 1):
        return same("one GPU per rollout rank")
    outcome = placement(source("cluster.component_placement"), source)
    placed = outcome.values.get("cluster.component_placement")
    if isinstance(placed, dict) and ":" in str(placed.get("rollout")):
        return part_of("cluster.component_placement", "GPUs of each rollout rank")
    return untranslated(
        f"ranks of {value} GPUs: give the rollout a key of its own, such as rollout: 0-7:0-{8 // number(value) - 1}"
    )
