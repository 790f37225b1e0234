"""A config that is valid and placed: what `platform-launch`, the Python calls and the tools begin with.

Config and placement are checked without torch or another heavy library, so a typo is reported at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from os import PathLike
from typing import NamedTuple

from rl_platform.config import Config, LoadedConfig, load_config
from rl_platform.config.extends import EXPLANATIONS
from rl_platform.config.layers import strings_of
from rl_platform.config.rollout_backend import chosen_backend
from rl_platform.config.schema.cluster import Cluster
from rl_platform.errors import ConfigError, PlacementError, Problem
from rl_platform.extras import find
from rl_platform.placement.decisions import ESTIMATES
from rl_platform.placement.inventory import Inventory, inventory_for
from rl_platform.placement.scheduler import Placement, schedule

START_CHECKS = "rl_platform.launch.start_checks"  # an extra


class PlacedConfig(NamedTuple):
    """A valid config, its placement, and the inventory it is placed on."""

    loaded: LoadedConfig
    placement: Placement
    inventory: Inventory

    @property
    def config(self) -> Config:
        """The config itself, without its origin."""
        return self.loaded.config


def load(
    config: str | PathLike[str] | Mapping[str, object],
    overrides: Sequence[str] | Mapping[str, object],
    *,
    stored: bool = False,
    starts: bool = False,
) -> PlacedConfig:
    """Returns a valid config, its placement and inventory. Raises ConfigError with the problems of all at once.

    stored: as in `load_config`. starts: a run follows on this machine, so missing files and models are listed too.
    """
    inventory: Inventory | None = None
    placement: Placement | None = None

    def check_cluster(cluster: Cluster) -> list[Problem]:
        nonlocal inventory, placement
        inventory = inventory_for(cluster)
        try:
            placement = schedule(cluster, inventory)
        except PlacementError as error:
            return error.problems
        if starts and cluster.reallocate != "off" and max(inventory.num_accelerators, len(inventory.nodes)) == 1:
            message = "this machine has one device, and so one placement"
            return [Problem("cluster.reallocate", message, value=cluster.reallocate, allowed="off")]
        return []

    missing = find(START_CHECKS, "missing.missing", None) if starts else find(START_CHECKS, "missing.unknown_env", None)
    loaded = load_config(config, overrides, check_cluster, missing, stored=stored)
    assert inventory is not None
    assert placement is not None
    on_gpus = bool(placement.accelerators.get("rollout")) and not placement.emulated
    grouped, _ = inventory.with_groups(loaded.config.cluster.node_groups)
    loaded = find(ESTIMATES, "compute_type.with_types", _as_written)(loaded, placement, inventory)
    chosen = chosen_backend(loaded.config.rollout.backend, on_gpus)
    return PlacedConfig(loaded.with_backend(*chosen), placement, grouped)


def _as_written(loaded: LoadedConfig, placement: Placement, inventory: Inventory) -> LoadedConfig:
    """Raises ConfigError for a `model.dtype` that only the estimates select."""
    for name in ("actor", "critic", "reference"):
        if (model := getattr(loaded.config, name).model) is not None and model.dtype == "auto":
            raise ConfigError([Problem(f"{name}.model.dtype", f"{ESTIMATES} is not installed", value="auto")])
    return loaded


@contextmanager
def located(loaded: LoadedConfig) -> Iterator[None]:
    """Adds the line of its key to each problem that a ConfigError of the block reports."""

    def with_place(problem: Problem) -> Problem:
        is_option = problem.key.startswith("--")
        return problem if problem.where or is_option else replace(problem, where=loaded.where(problem.key))

    try:
        named_paths: Callable[..., AbstractContextManager[None]] = find(
            EXPLANATIONS, "refused_paths.named_paths", lambda _: nullcontext()
        )
        with named_paths(lambda: strings_of(loaded.config.model_dump(mode="json"))):
            yield
    except ConfigError as error:
        placed = type(error)([with_place(problem) for problem in error.problems])
        for note in getattr(error, "__notes__", []):  # of a run that had begun
            placed.add_note(note)
        raise placed from None
