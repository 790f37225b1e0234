"""Scored responses: prompts stream through rollout and reward, and newer weights may arrive meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from rl_platform.config.schema import Config
from rl_platform.config.schema.rollout import CHANNEL_CAPACITY, Sampling
from rl_platform.errors import ChannelClosed, WorkerDied
from rl_platform.records import Prompt, Trajectory, Weights
from rl_platform.reporter import Reporter
from rl_platform.runners.component_groups import TypedGroups
from rl_platform.runners.phases import TakingTurns
from rl_platform.runners.recovery import Recovery
from rl_platform.runtime import Runtime
from rl_platform.runtime.channel import Channel
from rl_platform.runtime.weights_token import WeightsToken

UPDATES = 1024  # of weights, by reference
GATHER_S = 0.05  # how long scored responses wait for others, as each message interrupts the engine's process


class ScoredResponses:
    """Generates responses by the group `rollout` and scores them by `reward`."""

    def __init__(
        self,
        config: Config,
        runtime: Runtime,
        groups: TypedGroups,
        recovery: Recovery,
        turns: TakingTurns,
        reporter: Reporter,
    ) -> None:
        self._config, self._runtime, self._groups = config, runtime, groups
        self.recovery, self._turns, self._reporter = recovery, turns, reporter
        self._updating = threading.Lock()
        self._updates: Channel[Weights | WeightsToken] | None = None  # while responses are generated

    def update(self, weights: Weights | WeightsToken) -> bool:
        """Sends weights to the rollout while it generates. Returns False if it does not generate."""
        with self._updating:
            if self._updates is None:
                return False
            with suppress(ChannelClosed, WorkerDied):  # the attempt that follows a death loads them
                for rank in range(self._groups["rollout"].world_size):
                    self._updates.put(weights, key=rank)
            self.recovery.update(weights)
            return True

    def generate(
        self,
        prompts: Sequence[Prompt],
        samples: int,
        sampling: Sampling,
        purpose: str,
        step: int,
        on_arrival: Callable[[Sequence[Trajectory]], None] | None = None,
    ) -> list[Trajectory]:
        """Returns scored responses in the order of prompts and samples; some are scored while others are generated.

        on_arrival: called with responses as they arrive. If a process dies, the missing responses are generated again,
        with the same random numbers.
        """
        self._turns.before("generate")
        trajectories: list[Trajectory] = []
        total = len(prompts) * samples

        def fill() -> None:
            """Adds the scored responses that are not among `trajectories` yet."""
            generated = self._runtime.channel("trajectories", CHANNEL_CAPACITY, ["rollout"], ["reward"])
            scored = self._runtime.channel("scored", CHANNEL_CAPACITY, ["reward"], ["runner"])
            answered = [(trajectory.prompt.index, trajectory.sample) for trajectory in trajectories]
            live = self._config.updates_at_once
            updates = self._runtime.channel("updates", UPDATES, ["runner"], ["rollout"]) if live else None
            version = self.recovery.version  # before `update` may raise it
            with self.recovery.working(generated, scored) as calls, self._takes(updates):
                arguments = prompts, samples, sampling, purpose, step, generated  # starts first, as it takes longest
                calls.append(generating := self._groups["rollout"].generate(*arguments, version, answered, updates))
                calls.append(scoring := self._groups["reward"].stream(generated, scored))
                while len(trajectories) < total:
                    arrived = scored.get_many(total - len(trajectories), linger=GATHER_S)
                    trajectories.extend(arrived)
                    if on_arrival is not None:
                        on_arrival(arrived)
                    self._reporter.progress(len(trajectories), total, "responses")
                self._takes_no_more()
                generating.wait()
                generated.close()
                scored.close()  # without waiting for the result of `stream`
                scoring.wait()

        self.recovery.run(fill)
        place = {prompt.index: position for position, prompt in enumerate(prompts)}
        return sorted(trajectories, key=lambda trajectory: (place[trajectory.prompt.index], trajectory.sample))

    @contextmanager
    def _takes(self, updates: Channel[Weights | WeightsToken] | None) -> Iterator[None]:
        """Makes `update` send weights into this channel until `_takes_no_more`."""
        with self._updating:
            self._updates = updates
        try:
            yield
        finally:
            self._takes_no_more()

    def _takes_no_more(self) -> None:
        with self._updating:
            updates, self._updates = self._updates, None
        if updates is not None:
            with suppress(ChannelClosed, WorkerDied):  # after a death; the calls that it broke raise its error
                updates.close()
