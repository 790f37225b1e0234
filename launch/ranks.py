"""Checks, before anything starts, that the ranks of a component can share its work."""

from __future__ import annotations

from collections.abc import Iterator

from rl_platform.config.schema import Config
from rl_platform.errors import Problem
from rl_platform.placement.layout import LEARNERS
from rl_platform.placement.scheduler import Placement


def rank_problems(config: Config, placement: Placement) -> Iterator[Problem]:
    """Yields problems of the number of env ranks, and of ranks that own GPUs they cannot use."""
    if config.runner.task_type == "embodied":
        yield from _env_ranks(config, placement.world_size("env"))
    for name in (*LEARNERS, "rollout"):
        owned = max((len(slot.accelerators) for slot in placement.components.get(name, ())), default=0)
        spreads = name == "rollout" and config.rollout.backend == "sglang"
        if owned > 1 and not placement.emulated and not spreads:
            message = f"a rank of {name} computes on one GPU and would keep {owned - 1} more from others, unused"
            hint = "as many ranks as GPUs; --plan shows ranks that own several"
            yield Problem("cluster.component_placement", message, value=f"{owned} GPUs per rank", hint=hint)


def _env_ranks(config: Config, ranks: int) -> Iterator[Problem]:
    env = config.env
    parts = ranks * env.pipeline_stages
    stages = f" in {env.pipeline_stages} stages (env.pipeline_stages)" if env.pipeline_stages > 1 else ""
    for key, count in (("num_envs", env.num_envs), ("num_workers", env.num_workers)):
        if count % parts:
            message = f"{ranks} ranks of env{stages} cannot share these equally"
            hint = f"a multiple of {parts}, or other ranks in cluster.component_placement"
            yield Problem(f"env.{key}", message, value=str(count), hint=hint)
