"""The environments of all env ranks as one: rank 0 collects, every rank simulates an equal part of each stage.

The rollout does not depend on the number of ranks. Environments are seeded by their number in the run. Rank 0 counts
and normalises all observations, a whole stage at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import cast

import numpy as np

from rl_platform.envs.embodied.vector import StepResult, VectorEnv
from rl_platform.errors import ChannelClosed
from rl_platform.records import StateDict
from rl_platform.runtime.channel import Channel


@dataclass(frozen=True)
class Order:
    """The next work of another rank. With `actions`, the rank steps a stage (see `VectorEnv.send`). Without, it sends
    the observations of all its environments, and resets them first if there are `seeds`."""

    stage: int = 0
    actions: np.ndarray | None = None
    idle: np.ndarray | None = None
    seeds: tuple[int, ...] = ()


@dataclass(frozen=True)
class Peers:
    """The channels between env rank 0 and the others; a message's key is the rank."""

    orders: Channel[Order]
    answers: Channel[StepResult | np.ndarray]


class Shares:
    """The environments of each rank: every rank simulates an equal, contiguous part of each stage, in order."""

    def __init__(self, num_envs: int, stages: int, ranks: int) -> None:
        if num_envs % (stages * ranks):
            raise ValueError(f"{num_envs} environments in {stages} stages cannot be shared equally by {ranks} ranks")
        self.num_envs, self.stages, self.ranks = num_envs, stages, ranks
        self.size = num_envs // (stages * ranks)  # of a rank's part of a stage

    @property
    def rows(self) -> list[slice]:
        """The environments of each stage."""
        return [slice(*bounds) for bounds in pairwise(range(0, self.num_envs + 1, self.size * self.ranks))]

    def part(self, rank: int) -> slice:
        """Returns a rank's rows among those of a stage."""
        return slice(rank * self.size, (rank + 1) * self.size)

    def of(self, rank: int) -> np.ndarray:
        """Returns the environments of a rank, in the order in which it numbers them."""
        return np.concatenate([np.arange(self.num_envs)[rows][self.part(rank)] for rows in self.rows])


class AllEnvs:
    """The methods of `VectorEnv` that `Environment` calls, for the environments of all ranks, on rank 0."""

    def __init__(self, own: VectorEnv, shares: Shares, peers: Peers) -> None:
        self._own, self._shares, self._peers = own, shares, peers
        self._numbers = [shares.of(rank) for rank in range(shares.ranks)]
        self.rows = shares.rows

    @property
    def observations(self) -> np.ndarray:
        """Returns [num_envs,D] raw observations that await an action."""
        for rank in range(1, self._shares.ranks):
            self._order(Order(), rank)
        return self._whole(self._own.observations)

    def reset(self, seeds: Sequence[int]) -> None:
        """Begins an episode in every environment, each with its own seed [num_envs]."""
        own, *others = (tuple(np.asarray(seeds)[numbers].tolist()) for numbers in self._numbers)
        for rank, part in enumerate(others, start=1):
            self._order(Order(seeds=part), rank)
        self._whole(self._own.reset(own))

    def _whole(self, own: np.ndarray) -> np.ndarray:
        answers = cast("list[np.ndarray]", self._answers())  # to orders without a stage
        parts = [own, *answers]
        whole = np.empty((self._shares.num_envs, parts[0].shape[1]), parts[0].dtype)
        for numbers, part in zip(self._numbers, parts, strict=True):
            whole[numbers] = part
        return whole

    def send(self, actions: np.ndarray, stage: int, idle: np.ndarray | None = None) -> None:
        """Begins the step of a stage on every rank."""
        for rank in reversed(range(self._shares.ranks)):  # the others begin first
            part = self._shares.part(rank)
            order = Order(stage, actions[part], None if idle is None else idle[part])
            if rank:
                self._order(order, rank)
            else:
                self._own.send(actions[part], stage, order.idle)

    def receive(self, stage: int) -> StepResult:
        """Waits for the step of a stage on every rank; environments have their number in the run."""
        steps = cast("list[StepResult]", self._answers())
        return _joined([self._own.receive(stage), *steps], self._numbers)

    def _order(self, order: Order, rank: int) -> None:
        self._peers.orders.put(order, key=rank)

    def _answers(self) -> list[StepResult | np.ndarray]:
        """Returns one answer of each other rank, in order."""
        return [self._peers.answers.get(key=rank) for rank in range(1, self._shares.ranks)]


def follow_orders(envs: VectorEnv, rank: int, peers: Peers, done: Callable[[int], None]) -> None:
    """Executes the orders of rank 0 until it closes `peers.orders`; calls `done(steps)` before every step."""
    steps = 0
    while True:
        try:
            order = peers.orders.get(key=rank)
        except ChannelClosed:
            return
        if order.actions is None:
            peers.answers.put(envs.reset(order.seeds) if order.seeds else envs.observations, key=rank)
            continue
        done(steps)
        envs.send(order.actions, order.stage, order.idle)
        peers.answers.put(envs.receive(order.stage), key=rank)
        steps += 1


def _joined(results: Sequence[StepResult], numbers: Sequence[np.ndarray]) -> StepResult:
    arrays = ("observations", "rewards", "terminated", "truncated", "ended", "invalid", "final_observations")
    episodes = [
        replace(episode, env_index=int(numbers[rank][episode.env_index]))
        for rank, result in enumerate(results)
        for episode in result.episodes
    ]
    whole = {name: np.concatenate([getattr(result, name) for result in results]) for name in arrays}
    return StepResult(**whole, episodes=episodes, failures=sum(result.failures for result in results))


def joined_states(states: Sequence[StateDict], shares: Shares) -> StateDict:
    """Returns the `VectorEnv.state_dict` of all environments, joined from those of the ranks."""
    width = len(states[0]["observations"]) // len(states[0]["envs"])
    observations: list[bytes] = [b""] * shares.num_envs
    envs: list[object] = [None] * shares.num_envs
    unseen: list[int] = []
    for rank, state in enumerate(states):
        numbers = shares.of(rank).tolist()
        for own, number in enumerate(numbers):
            observations[number] = state["observations"][own * width : (own + 1) * width]
            envs[number] = state["envs"][own]
        unseen += [numbers[own] for own in state["unseen"]]
    whole = {
        "num_envs": shares.num_envs,
        "observations": b"".join(observations),
        "envs": envs,
        "unseen": sorted(unseen),
    }
    return {**states[0], **whole}
