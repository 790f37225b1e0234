"""Runs the phases of one stage of a PPO step on worker groups, side by side where they share no device.

Components that share devices leave them for one another (`TakingTurns`). The plan (`rl_platform.planner.step_timeline`)
draws the phases by the same rules.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

from rl_platform.config.schema import Config
from rl_platform.errors import WorkerDied
from rl_platform.placement.chains import chains
from rl_platform.placement.decisions import weight_transfer
from rl_platform.placement.offload_order import CAN_LEAVE, OffloadOrder
from rl_platform.reporter import Reporter
from rl_platform.runtime.worker_group import Handle, WorkerGroup
from rl_platform.tracing import recorder

T = TypeVar("T")


@dataclass(frozen=True)
class Phase(Generic[T]):
    """The work of `component` in a phase of the step. `call` starts it, given the results of the phases before it in
    its chain; every rank returns the results: tensors of a batch or metrics, by name."""

    name: str
    component: str
    call: Callable[[dict[str, T]], Handle[dict[str, T]]]


class TakingTurns:
    """Components, by name, that share devices. A component returns to its devices when it is called; the others must
    have left before."""

    def __init__(self, turns: OffloadOrder, groups: Mapping[str, WorkerGroup]) -> None:
        self.turns, self.groups = turns, groups

    def before(self, phase: str) -> None:
        """Returns when the components that must not be on the devices of `phase` have left them.

        A rank of the rollout that died has left, too. `Recovery` starts it again when the rollout is called next.
        """
        leaving = [(name, self.groups[name].offload(weights)) for name, weights in self.turns.leaves_before(phase)]
        for name, handle in leaving:
            try:
                handle.wait()
            except WorkerDied:
                if name != "rollout":
                    raise
                handle.settle()  # the other ranks


def with_turns(config: Config, turns: OffloadOrder) -> Config:
    """Returns the config in which `offload` of every component is true or false, and no longer auto, and
    `weight_transfer` not auto where a process group cannot carry weights."""
    offload = {f"{name}.offload": name in turns.leaving for name in CAN_LEAVE}
    return config.changed(offload | {"rollout.weight_transfer": weight_transfer(config, turns.layout)})


class Phases:
    """`turns` None: all components are on the same devices and stay there."""

    def __init__(self, config: Config, turns: TakingTurns | None, reporter: Reporter) -> None:
        self._config, self._turns, self._reporter = config, turns, reporter
        self._threads = ThreadPoolExecutor(thread_name_prefix="runner (side by side)")

    def run(self, stage: Sequence[Phase[T]]) -> dict[str, T]:
        """Returns the results of all phases of a stage.

        Raises the error of the first phase that fails, without waiting for the others.
        """
        results: dict[str, T] = {}
        side_by_side = self._chains(stage)
        if len(side_by_side) < 2:
            for chain in side_by_side:
                results |= self._follow(chain)
            return results
        running = [self._threads.submit(self._follow_beside, chain) for chain in side_by_side]
        done, _ = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_EXCEPTION)
        for ended in (*done, *running):  # an error first, while others still run
            results |= ended.result()
        return results

    def _chains(self, stage: Sequence[Phase[T]]) -> list[list[Phase[T]]]:
        if self._turns is None:
            return [list(stage)]
        components = dict.fromkeys(phase.component for phase in stage)
        names_of_chains = chains(components, self._config, self._turns.turns.layout)
        return [[phase for phase in stage if phase.component in names] for names in names_of_chains]

    def _follow_beside(self, chain: Sequence[Phase[T]]) -> dict[str, T]:
        recorder.settle("run", f"runner ({chain[0].component})")  # in one lane of the timeline they would overlap
        return self._follow(chain)

    def _follow(self, chain: Sequence[Phase[T]]) -> dict[str, T]:
        results: dict[str, T] = {}
        for phase in chain:
            with self._reporter.phase(phase.name):
                if self._turns is not None:
                    self._turns.before(phase.name)
                results |= phase.call(results).wait(on_progress=self._reporter.progress)[0]
        return results


class ComponentTimings:
    """Seconds of the slowest rank per component and method, as `time/<group>.<method>`, <group> being `group_name`."""

    def __init__(self, config: Config, groups: Mapping[str, WorkerGroup]) -> None:
        self._groups = {_group_name(config, name): group for name, group in groups.items()}
        self._before: dict[str, float] = {}
        self.since_last()

    def since_last(self) -> dict[str, float]:
        """Returns the seconds that were added since the last call."""
        now = {
            f"time/{name}.{method}": seconds
            for name, group in self._groups.items()
            for method, (_, seconds) in group.timings().items()
        }
        added = {name: seconds - self._before.get(name, 0.0) for name, seconds in now.items()}
        self._before = now
        return {name: seconds for name, seconds in added.items() if seconds > 0}


def _group_name(config: Config, component: str) -> str:
    names = {
        "actor_critic": config.actor.group_name,
        "actor": config.actor.group_name,
        "critic": config.critic.group_name,
        "reference": config.reference.group_name,
        "rollout": config.rollout.group_name,
        "reward": config.reward.group_name,
        "env": config.env.group_name,
    }
    return names[component] or component
