"""Runs the phases of one stage of a PPO step on worker groups: side by side where they share no device.

The plan (`rl_platform.planner.step_timeline`) draws them by the same rule.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from rl_platform.config.schema import Config
from rl_platform.metrics import Reporter
from rl_platform.placement.chains import chains
from rl_platform.runners.turns import TakingTurns
from rl_platform.runtime.worker_group import Handle
from rl_platform.tracing import recorder

Found = dict[str, Any]


@dataclass(frozen=True)
class Phase:
    """What `component` does in a phase of the step. `call` starts it, given what the phases before it in its chain have
    found, and its ranks answer with what it finds, by name."""

    name: str
    component: str
    call: Callable[[Mapping[str, Any]], Handle]


class Phases:
    """`turns` None: everything is on the same devices, and nobody leaves them for others."""

    def __init__(self, config: Config, turns: TakingTurns | None, reporter: Reporter) -> None:
        self._config, self._turns, self._reporter = config, turns, reporter
        self._threads = ThreadPoolExecutor(thread_name_prefix="runner (side by side)")

    def run(self, stage: Sequence[Phase]) -> Found:
        """What all phases of a stage have found.

        Raises what the first phase to fail has raised, without waiting for others.
        """
        found: Found = {}
        side_by_side = self._chains(stage)
        if len(side_by_side) < 2:
            for chain in side_by_side:
                found |= self._follow(chain)
            return found
        running = [self._threads.submit(self._follow_beside, chain) for chain in side_by_side]
        done, _ = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_EXCEPTION)
        _raise_first(done)
        for ended in running:
            found |= ended.result()
        return found

    def _chains(self, stage: Sequence[Phase]) -> list[list[Phase]]:
        if self._turns is None:
            return [list(stage)]
        components = dict.fromkeys(phase.component for phase in stage)
        found = chains(components, self._config, self._turns.turns.layout)
        return [[phase for phase in stage if phase.component in chain] for chain in found]

    def _follow_beside(self, chain: Sequence[Phase]) -> Found:
        recorder.settle("run", f"runner ({chain[0].component})")  # in one lane of the timeline they would overlap
        return self._follow(chain)

    def _follow(self, chain: Sequence[Phase]) -> Found:
        found: Found = {}
        for phase in chain:
            with self._reporter.phase(phase.name):
                if self._turns is not None:
                    self._turns.before(phase.name)
                found |= phase.call(found).wait(on_progress=self._reporter.progress)[0]
        return found


def _raise_first(done: set[Future[Found]]) -> None:
    for ended in done:
        if (error := ended.exception()) is not None:
            raise error
