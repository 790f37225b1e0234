"""The keys `offload` and their rules: who cannot leave its devices."""

from __future__ import annotations

from collections.abc import Iterator

from rl_platform.config.rules import BrokenRule
from rl_platform.config.schema import Config
from rl_platform.config.schema.models import Offload


def offload_keys(config: Config) -> dict[str, Offload]:
    """The keys `offload` by component."""
    return {
        "actor": config.actor.offload,
        "critic": config.critic.offload,
        "reference": config.reference.offload,
        "rollout": config.rollout.offload,
    }


def broken_offload_rules(config: Config) -> Iterator[BrokenRule]:
    """The rules that `config` breaks."""
    algorithm, staleness = config.algorithm, "runner.max_staleness"
    for name, asked in offload_keys(config).items():
        if asked is True and config.runner.max_staleness:
            message = f"{staleness} generates while the models are trained: nobody can leave for the others"
            yield BrokenRule(f"{name}.offload", message, (staleness,), f"{name}.offload: auto")
    full = {"kl_penalty": algorithm.full_kl_in_reward, "kl_loss_type": algorithm.full_kl_in_loss}
    for key, used in full.items():
        if used and config.reference.offload is True:
            message = f"{key} full compares to the reference's output matrix in the actor's passes, so it stays"
            yield BrokenRule("reference.offload", message, (f"algorithm.{key}",), "reference.offload: auto")
