"""Recovery from the death of a process that was started again: sends the weights to it and repeats its work."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TypeVar

from rl_platform.config.schema.env import Env
from rl_platform.envs.embodied.block import STATES
from rl_platform.errors import CheckpointError, WorkerDied, WorkerError
from rl_platform.extras import find
from rl_platform.records import StateDict, Weights, WeightsReceived
from rl_platform.runners.component_groups import EnvGroup, RolloutGroup
from rl_platform.runtime import Runtime
from rl_platform.runtime.channel import Channel
from rl_platform.runtime.weights_token import WeightsToken
from rl_platform.runtime.worker_group import Handle

T = TypeVar("T")


class Recovery:
    """Stores the weights that the rollout must have, and sends them to ranks that were started again."""

    def __init__(self, runtime: Runtime, rollout: RolloutGroup, idle: Callable[[], None] = lambda: None) -> None:
        self.runtime, self.rollout, self._idle = runtime, rollout, idle
        self.version = -1
        self._weights: Weights | WeightsToken | None = None
        self._received: list[WeightsReceived] = []
        self._behind: set[int] = set()  # ranks without these weights
        self._updated = False  # since the last `sync`
        self._calls: list[Handle[object]] = []  # of an attempt that failed

    def sync(self, weights: Weights | WeightsToken, again: Callable[[], object] | None = None) -> dict[str, float]:
        """Sends weights to all ranks of the rollout; returns metrics of what they received from other processes.
        `again`: as in `run`."""
        self._weights, self.version, self._updated = weights, weights.version, False
        self._behind, self._received = set(range(self.rollout.world_size)), []
        self.run(lambda: None, again)
        if isinstance(weights, Weights):  # tensors by reference: the rollout is in this process and cannot restart
            self._weights = None
        return {
            "weights/bytes": float(sum(receipt.bytes for receipt in self._received)),
            "weights/buckets": float(sum(receipt.buckets for receipt in self._received)),
        }

    def update(self, weights: Weights | WeightsToken) -> None:
        """Stores weights that the rollout receives while it works. After a death every rank receives them again."""
        self.version, self._updated = weights.version, True
        if not isinstance(weights, Weights):
            self._weights = weights

    def run(self, attempt: Callable[[], T], again: Callable[[], object] | None = None) -> T:
        """Returns the result of `attempt`; repeated after a death, once the rollout has its weights and `again()` has
        returned.

        `attempt` makes its calls in `working`. Raises WorkerDied if the process is not started again.
        """
        failed = False
        while True:
            try:
                self._catch_up()
                if failed and again is not None:
                    again()
                return attempt()
            except WorkerDied as error:
                restarted, failed = self.runtime.restart(error, self._settle), True
            self._behind |= {rank for component, rank in restarted if component == self.rollout.name}
            if self._updated:  # a channel that was closed may have held the weights
                self._behind = set(range(self.rollout.world_size))

    @contextmanager
    def working(self, *channels: Channel[object]) -> Iterator[list[Handle[object]]]:
        """Calls added to the list end before the next attempt: after a death the channels are closed.

        Results of such a call are lost, except items that another component has received.
        """
        calls: list[Handle[object]] = []
        try:
            yield calls
        except WorkerDied as error:
            self._calls += calls
            for channel in channels:
                with suppress(WorkerDied):  # it lived in the process that died
                    channel.close(error)
            raise

    def metrics(self) -> dict[str, float]:
        return {"runtime/restarts": float(self.runtime.restarts)}

    def _settle(self) -> None:
        calls, self._calls = self._calls, []
        for call in calls:
            call.settle()

    def _catch_up(self) -> None:
        if not self._behind or self._weights is None:
            return
        ranks, weights = sorted(self._behind), self._weights
        if isinstance(weights, WeightsToken):
            weights = replace(weights, receivers=len(ranks))
        self._idle()
        with self.working() as calls:
            calls.append(receiving := self.rollout.on(ranks).receive(weights))
            received: list[WeightsReceived] = receiving.wait()
        for rank, receipt in zip(ranks, received, strict=True):
            if receipt.version != self.version:
                raise WorkerError(
                    f"rollout[{rank}] has weights version {receipt.version}; {self.version} were published"
                )
        self._behind = set()
        self._received += received


@dataclass(frozen=True)
class EnvPart:
    """The env group as a part of a checkpoint, which is the same for any number of ranks."""

    group: EnvGroup
    env: Env

    def state_dict(self) -> Saving:
        return Saving(self.group.state_dict(), self.env)

    def load_state_dict(self, state: StateDict) -> Handle[None]:
        new_episodes = self.group.load_state_dict(state).wait()
        return self.group.rank(0).see_new_episodes(new_episodes)

    def refuse_code(self, state: StateDict) -> None:
        """Raises CheckpointError if loading `state` may run code, see `env_state`."""
        find(STATES, "env_state.refuse_code", _refuse)(state["envs"]["envs"])


def _refuse(states: Sequence[bytes]) -> None:
    raise CheckpointError(f"states of environments cannot be read: {STATES} is not installed")


@dataclass(frozen=True)
class Saving:
    """The state of the env group, as soon as all ranks have returned theirs."""

    handle: Handle[StateDict]
    env: Env

    def wait(self) -> list[StateDict]:
        """Returns the states of all ranks joined to one."""
        states = self.handle.wait()
        if len(states) == 1:
            return states
        from rl_platform.components.env_ranks.all_envs import Shares, joined_states

        shares = Shares(self.env.num_envs, self.env.pipeline_stages, len(states))
        return [{**states[0], "envs": joined_states([state["envs"] for state in states], shares)}]


class RestorableEnvs:
    """The environments. Their state is stored if their processes or those of the rollout can be started again.

    A repeated collection gives the same rollout. The state is read while the models are trained, so an environment that
    dies at that time ends the run.
    """

    def __init__(self, recovery: Recovery, env: EnvPart) -> None:
        self.recovery, self.env = recovery, env
        self.keeps = any(recovery.runtime.restartable(component) for component in ("env", "rollout"))
        self._reading: Saving | None = None  # the state in which the next rollout begins

    def collect(self, attempt: Callable[[], T]) -> T:
        """Returns the result of `attempt`, which steps the environments; repeated after a death from their earlier
        state."""
        result = self.evaluate(attempt)
        self._reading = self.env.state_dict() if self.keeps else None
        return result

    def evaluate(self, attempt: Callable[[], T]) -> T:
        """Returns the result of `attempt`, which leaves the environments as they are; repeated after a death."""
        return self.recovery.run(attempt, self._restoring())

    def sync(self, weights: Weights | WeightsToken) -> dict[str, float]:
        """As `Recovery.sync`. The process of a rollout may hold environments, which died with it."""
        return self.recovery.sync(weights, self._restoring())

    def _restoring(self) -> Callable[[], object] | None:
        """Returns a call that brings the environments back to their state of now."""
        if not self.keeps:
            return None
        self._reading = self._reading or self.env.state_dict()
        state = self._reading.wait()[0]
        return lambda: self.env.load_state_dict(state).wait()
