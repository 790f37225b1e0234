"""How long each component worked, method by method, since the step before."""

from __future__ import annotations

from collections.abc import Mapping

from rl_platform.config.schema import Config
from rl_platform.runtime.worker_group import WorkerGroup


class ComponentTimings:
    """Seconds of the slowest rank per component and method, as `time/<group>.<method>`, <group> being `group_name`."""

    def __init__(self, config: Config, groups: Mapping[str, WorkerGroup]) -> None:
        self._groups = {_group_name(config, name): group for name, group in groups.items()}
        self._before: dict[str, float] = {}
        self.since_last()

    def since_last(self) -> dict[str, float]:
        """What was added since the last call."""
        now = {
            f"time/{name}.{method}": seconds
            for name, group in self._groups.items()
            for method, (_, seconds) in group.timings().items()
        }
        found = {name: seconds - self._before.get(name, 0.0) for name, seconds in now.items()}
        self._before = now
        return {name: seconds for name, seconds in found.items() if seconds > 0}


def _group_name(config: Config, component: str) -> str:
    sections = {
        "actor": config.actor,
        "actor_critic": config.actor,
        "critic": config.critic,
        "reference": config.reference,
        "rollout": config.rollout,
        "reward": config.reward,
        "env": config.env,
    }
    return sections[component].group_name or component
